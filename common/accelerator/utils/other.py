"""Small helpers for scripts: one object in a file, ports, and what is inside a wrapped model."""

import codecs
import logging
import operator
import platform
import re
import socket
import sys
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from common.files import atomic_write

from ..commands.config.default import write_basic_config  # noqa: F401
from ..out_of_scope import out_of_scope
from ..state import PartialState
from .weights import clean_state_dict_for_safetensors, write_file

logger = logging.getLogger(__name__)

FIRST_GOOD_KERNEL = (5, 5)


def is_port_in_use(port: int | str | None = None) -> bool:
    """Whether another process of this machine listens on `port`, by default torch's 29500."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(port or 29500)))
        except OSError:
            return True
    return False


def get_free_port() -> int:
    """A port that no process of this machine uses at this moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def save(obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Write `obj` to `f` from the main process: whole or not at all, if `f` is a path.

    Args:
        obj: what `torch.save` takes; with `safe_serialization` a mapping from names to tensors.
        f: a path, or an open file.
        save_on_each_node: write from one process of every machine.
        safe_serialization: write a safetensors file.

    Raises:
        OSError: if it cannot be written; what was there before is then untouched.
    """
    state = PartialState()
    writes = state.is_local_main_process if save_on_each_node else state.is_main_process
    if not writes:
        return
    if hasattr(f, "write"):
        _write_to_open_file(obj, f, safe_serialization)
        return
    with atomic_write(f) as draft:
        write_file(obj, draft, safe_serialization)


def _write_to_open_file(obj: Any, file: Any, safe_serialization: bool) -> None:
    if safe_serialization:
        from safetensors.torch import save as as_bytes

        file.write(as_bytes(clean_state_dict_for_safetensors(obj), metadata={"format": "pt"}))
    else:
        torch.save(obj, file)


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """`torch.load(f, map_location, **kwargs)`, which executes nothing unless told so, and takes arrays of NumPy too.

    Raises:
        UnpicklingError: if the file asks for code to be executed.
    """
    settings = {"weights_only": True, **kwargs}
    with torch.serialization.safe_globals(_types_of_arrays()):
        return torch.load(f, map_location=map_location, **settings)


def _types_of_arrays() -> list[Any]:
    """What a file with arrays of NumPy names, as accelerate's `random_states_0.pkl` does: numbers, and no code."""
    try:
        import numpy
    except ImportError:
        return []
    reconstruct = numpy.empty(0).__reduce__()[0]
    return [reconstruct, numpy.ndarray, numpy.dtype, type(numpy.dtype("uint32")), codecs.encode]


def is_compiled_module(module: Any) -> bool:
    """Whether `module` is what `torch.compile` returned for a module."""
    # Importing torch._dynamo takes long. Whoever has compiled something has imported it.
    if "torch._dynamo" not in sys.modules:
        return False
    return isinstance(module, torch._dynamo.eval_frame.OptimizedModule)


def extract_model_from_parallel(
    model: Any,
    keep_fp32_wrapper: bool = True,
    keep_torch_compile: bool = True,
    recursive: bool = False,
) -> torch.nn.Module:
    """The model inside DistributedDataParallel or DataParallel.

    Args:
        model: prepared or not.
        keep_fp32_wrapper: leave the forward as `prepare` made it for mixed precision, instead of the script's own.
        keep_torch_compile: of a compiled model return the compiled one, which then holds the unwrapped model.
        recursive: unwrap every submodule too.
    """
    compiled = None
    if is_compiled_module(model):
        compiled = model
        model = model._orig_mod
    while isinstance(model, (DistributedDataParallel, DataParallel)):
        model = model.module
    if recursive:
        model = _unwrap_with_submodules(model)
    if not keep_fp32_wrapper:
        _restore_forward(model)
    if compiled is not None and keep_torch_compile:
        compiled._orig_mod = model
        return compiled
    return model


def _unwrap_with_submodules(module: Any) -> torch.nn.Module:
    if hasattr(module, "module"):
        module = _unwrap_with_submodules(module.module)
    for name, child in module.named_children():
        unwrapped = _unwrap_with_submodules(child)
        setattr(module, name, unwrapped)
    return module


def _restore_forward(model: torch.nn.Module) -> None:
    original_forward = model.__dict__.pop("_original_forward", None)
    if original_forward is not None:
        model.forward = original_forward


def wait_for_everyone() -> None:
    """Return when every process has called this."""
    PartialState().wait_for_everyone()


def get_pretty_name(obj: Any) -> str:
    """The name of a class or function; of another object, that of its class."""
    if not hasattr(obj, "__qualname__") and not hasattr(obj, "__name__"):
        obj = type(obj)
    return getattr(obj, "__qualname__", None) or obj.__name__


def merge_dicts(source: dict[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """Write the values of `source` into `destination`, those of nested dicts too, and return `destination`."""
    for key, value in source.items():
        if isinstance(value, dict):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination


def convert_bytes(size: float) -> str:
    """A number of bytes in the largest unit of which there is at least one, as in "1.5 KB"."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} PB"


def recursive_getattr(obj: Any, attr: str) -> Any:
    """The attribute of an attribute: `recursive_getattr(model, "head.weight")`."""
    return operator.attrgetter(attr)(obj)


def check_os_kernel() -> None:
    """Warn if this is Linux older than 5.5, on which processes may hang (huggingface/accelerate#1929)."""
    if platform.system() != "Linux":
        return
    release = re.match(r"(\d+)\.(\d+)", platform.release())
    if release is None:
        return
    version = (int(release[1]), int(release[2]))
    if version < FIRST_GOOD_KERNEL:
        minimum = "5.5.0"
        message = f"Detected kernel version {platform.release()}, which is below the recommended minimum of {minimum}"
        logger.warning(f"{message}; this can cause the process to hang")


def get_module_children_bottom_up(model: torch.nn.Module, return_fqns: bool = False) -> list[Any]:
    """`model` and all its submodules, each after its children; with `return_fqns`, pairs of a name and a module."""
    ordered = []
    to_visit = [("", model)]
    while to_visit:
        name, module = to_visit.pop()
        ordered.append((name, module) if return_fqns else module)
        for child_name, child in module.named_children():
            full_name = f"{name}.{child_name}" if name else child_name
            to_visit.append((full_name, child))
    return ordered[::-1]


def has_compiled_regions(module: torch.nn.Module) -> bool:
    """Whether `torch.compile` made `module`, which has submodules, or one of them."""
    if not module._modules:
        return False
    return any(is_compiled_module(part) for part in module.modules())


def is_repeated_blocks(module: torch.nn.Module) -> bool:
    """Whether `module` is a list of modules of one class."""
    if not isinstance(module, torch.nn.ModuleList) or len(module) == 0:
        return False
    block = type(module[0])
    return all(isinstance(each, block) for each in module)


def has_repeated_blocks(module: torch.nn.Module) -> bool:
    """Whether there is a list of modules of one class within `module`."""
    return any(is_repeated_blocks(part) for part in module.modules())


def model_has_dtensor(model: torch.nn.Module) -> bool:
    """Whether a parameter is spread over several devices."""
    tensor_module = sys.modules.get("torch.distributed.tensor")
    if tensor_module is None:  # whoever has such a parameter has imported it
        return False
    return any(isinstance(parameter, tensor_module.DTensor) for parameter in model.parameters())


def get_model_tp_size(model: torch.nn.Module) -> int | None:
    """Over how many processes a model of transformers was split, as it says itself; None if it was not."""
    size = getattr(model, "tp_size", None)
    if size is not None:
        return size
    config = getattr(model, "config", None)
    distributed = getattr(config, "distributed_config", None)
    if isinstance(distributed, dict):
        return distributed.get("tp_size")
    return getattr(distributed, "tp_size", None)


compile_regions = out_of_scope("compile_regions")
compile_regions_deepspeed = out_of_scope("compile_regions_deepspeed")
compile_regions_fsdp2 = out_of_scope("compile_regions_fsdp2")
