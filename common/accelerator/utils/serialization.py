"""Files of `torch.save` that can be loaded without executing code, which is found out when they are written.

`torch.load(weights_only=True)` refuses NumPy's types, though learning rates and schedulers often hold them. So numbers
of NumPy are saved as Python's, and its arrays as tensors with a mark that makes them arrays again.
"""

import contextlib
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from .checkpoint_folder import CheckpointError

_ARRAY_MARK = "numpy.ndarray as a tensor"
# Other types of containers may hold more than their items, so they are saved as they are.
_CONTAINERS = (dict, OrderedDict, list, tuple, set)


class UnsafeFileError(CheckpointError, pickle.UnpicklingError):
    """A file could be loaded only by executing code that it names."""


def save_loadable(obj: Any, path: Path) -> None:
    """`torch.save(obj, path)`, of which `load_safely(path)` makes an equal object.

    The file has no checksums of torch's own, which take a third of the time: a checkpoint's manifest has them.

    Raises:
        UnsafeFileError: if it would not; the file is then there nevertheless.
    """
    with _without_crc32_of_torch():
        torch.save(_without_numpy(obj), path)
    try:
        # Mapped into memory, the tensors are not read: only what describes them is.
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        reason = _first_reason(error)
        raise UnsafeFileError(f"{path.name} is not saved, for nothing could load it safely: {reason}") from error


@contextlib.contextmanager
def _without_crc32_of_torch() -> Iterator[None]:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def load_safely(path: Path, map_location: Any = "cpu", **load_kwargs: Any) -> Any:
    """The object that `save_loadable` wrote to `path`; `load_kwargs` are for `torch.load`.

    Raises:
        UnsafeFileError: if the file asks for code to be executed.
    """
    settings = {"map_location": map_location, **load_kwargs, "weights_only": True}
    try:
        return _with_numpy(torch.load(path, **settings))
    except pickle.UnpicklingError as error:
        raise UnsafeFileError(f"{path} is not loaded, for it could execute code: {_first_reason(error)}") from error


def _first_reason(error: pickle.UnpicklingError) -> str:
    """The line of torch's long message that names what was refused."""
    for line in str(error).splitlines():
        if "Unpickler error" in line:
            return line.strip().partition(". Please use")[0]
    return str(error).partition("\n")[0]


def _without_numpy(obj: Any) -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is None:  # then `obj` holds nothing of it
        return obj

    def replacement(part: Any) -> Any:
        if isinstance(part, numpy.generic):
            return part.item()
        if type(part) is numpy.ndarray:
            return _marked_tensor(part)
        return part

    return _replace_parts(obj, replacement)


def _marked_tensor(array: Any) -> Any:
    try:
        # A copy, for torch shares no memory that is read-only or runs backwards.
        return {_ARRAY_MARK: torch.from_numpy(array.copy())}
    except (TypeError, ValueError):  # of texts, objects or foreign byte order: torch.load refuses it by name
        return array


def _with_numpy(obj: Any) -> Any:
    def replacement(part: Any) -> Any:
        is_marked = type(part) is dict and list(part) == [_ARRAY_MARK]
        return part[_ARRAY_MARK].numpy() if is_marked else part

    return _replace_parts(obj, replacement)


def _replace_parts(obj: Any, replacement: Callable[[Any], Any], within: tuple[int, ...] = ()) -> Any:
    """`obj` with every part of it replaced for which `replacement(part)` is another object.

    `within` are the ids of the containers around `obj`: one that holds itself is not entered twice.
    """
    replaced = replacement(obj)
    if replaced is not obj or type(obj) not in _CONTAINERS or id(obj) in within:
        return replaced
    within = (*within, id(obj))
    parts = _parts(obj)
    new_parts = [_replace_parts(part, replacement, within) for part in parts]
    if all(new is old for new, old in zip(new_parts, parts, strict=True)):
        return obj
    if isinstance(obj, dict):
        pairs = zip(new_parts[0::2], new_parts[1::2], strict=True)
        return type(obj)(pairs)
    return type(obj)(new_parts)


def _parts(container: Any) -> list[Any]:
    """The items of a sequence or a set; of a mapping the first key, its value, the second key, …"""
    if isinstance(container, dict):
        return [part for pair in container.items() for part in pair]
    return list(container)
