"""Small helpers for scripts: one object in a file, and ports."""

import socket
from typing import Any

import torch

from common.files import atomic_write

from ..state import PartialState
from .serialization import types_of_numpy
from .unwrap import extract_model_from_parallel, is_compiled_module  # noqa: F401  # the original has them here
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


def wait_for_everyone() -> None:
    """Return when every process has called this."""
    PartialState().wait_for_everyone()
