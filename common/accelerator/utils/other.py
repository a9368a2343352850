"""Small helpers for scripts: one object in a file, ports, and what is inside a wrapped model."""

import socket
import sys
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from common.files import atomic_write

from ..state import PartialState
from .serialization import types_of_numpy
from .weights import write_safetensors


def is_port_in_use(port: int | str | None = None) -> bool:
    """True if no server can be started on `port`, by default torch's 29500: another one listens, or it is reserved."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(port or 29500)))
        except OSError:
            return True
    return False


def save(obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Write `obj` to `f` from the main process: whole or not at all, if `f` is a path.

    Args:
        obj: what `torch.save` takes; with `safe_serialization` a mapping from names to tensors.
        f: a path, or an open file, but not for safetensors.
        save_on_each_node: write from one process of every machine.
        safe_serialization: write a safetensors file.
    """
    state = PartialState()
    writes = state.is_local_main_process if save_on_each_node else state.is_main_process
    if not writes:
        return
    if hasattr(f, "write") and not safe_serialization:
        torch.save(obj, f)
        return
    with atomic_write(f) as draft:
        if safe_serialization:
            write_safetensors(obj, draft)
        else:
            torch.save(obj, draft)


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """`torch.load(f, map_location, **kwargs)`, which executes nothing unless told so, and takes arrays of NumPy too.

    Raises:
        UnpicklingError: if the file asks for code to be executed.
    """
    settings = {"weights_only": True, **kwargs}
    with torch.serialization.safe_globals(types_of_numpy()):
        return torch.load(f, map_location=map_location, **settings)


def is_compiled_module(module: Any) -> bool:
    """True if `module` is what `torch.compile` returned for a module."""
    # Importing torch._dynamo takes long. Whoever has compiled something has imported it.
    if "torch._dynamo" not in sys.modules:
        return False
    return isinstance(module, torch._dynamo.eval_frame.OptimizedModule)


def innermost_model(model: Any) -> torch.nn.Module:
    """The model that the script made, inside compiled models, DistributedDataParallel and DataParallel in any order.

    This is for code that needs the modules and parameters themselves. It changes nothing.
    """
    while is_compiled_module(model) or isinstance(model, (DistributedDataParallel, DataParallel)):
        model = model._orig_mod if is_compiled_module(model) else model.module
    return model


def extract_model_from_parallel(
    model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
) -> torch.nn.Module:
    """The model inside DistributedDataParallel or DataParallel, as `Accelerator.unwrap_model` gives it.

    This is for a script that wants to call or save its model. Unlike `innermost_model`, it keeps a compiled model
    compiled by default.

    Args:
        model: prepared or not.
        keep_fp32_wrapper: leave the forward as `prepare` made it for mixed precision. Otherwise the model, and with it
            the prepared one, has the script's own forward from then on.
        keep_torch_compile: return a compiled model compiled. It holds the unwrapped model from then on.
    """
    compiled = None
    if is_compiled_module(model):
        compiled = model
        model = model._orig_mod
    while isinstance(model, (DistributedDataParallel, DataParallel)):
        model = model.module
    if not keep_fp32_wrapper:
        original_forward = model.__dict__.pop("_original_forward", None)
        if original_forward is not None:
            model.forward = original_forward
    if compiled is not None and keep_torch_compile:
        compiled._orig_mod = model
        return compiled
    return model


def wait_for_everyone() -> None:
    """Return when every process has called this."""
    PartialState().wait_for_everyone()
