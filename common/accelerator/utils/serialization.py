"""Files of `torch.save` that can be loaded without executing code, which is found out when they are written."""

import codecs
import contextlib
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .checkpoint_folder import CheckpointError

_TYPES_OF_NUMBERS = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128"
)


class UnsafeFileError(CheckpointError, pickle.UnpicklingError):
    """A file could be loaded only by executing code that it names."""


def types_of_numpy() -> list[Any]:
    """The types and functions that a file names which holds numbers of NumPy, or arrays of them, and no code.

    Learning rates and schedulers often hold them, and so does the state of NumPy's generator.
    """
    try:
        import numpy
    except ImportError:
        return []
    make_array = numpy.empty(0).__reduce__()[0]
    make_number = numpy.float64(0).__reduce__()[0]
    types_of_numbers = [type(numpy.dtype(name)) for name in _TYPES_OF_NUMBERS.split()]
    return [make_array, make_number, numpy.ndarray, numpy.dtype, *types_of_numbers, codecs.encode, bytes]


def save_loadable(obj: Any, path: Path) -> None:
    """`torch.save(obj, path)`, of which `load_safely(path)` makes an equal object.

    The file has no checksums of torch's own, which take a third of the time: a checkpoint's manifest has them.

    Raises:
        UnsafeFileError: if it would not; the file is then there nevertheless.
    """
    with _without_crc32_of_torch():
        torch.save(obj, path)
    try:
        # Mapped into memory, the tensors are not read: only what describes them is.
        _load(path, map_location="cpu", mmap=True)
    except pickle.UnpicklingError as error:
        raise UnsafeFileError(
            f"{path.name} is not saved, for nothing could load it safely: {_reason(error)}"
        ) from error


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
    try:
        return _load(path, **{"map_location": map_location, **load_kwargs})
    except pickle.UnpicklingError as error:
        raise UnsafeFileError(f"{path} is not loaded, for it could execute code: {_reason(error)}") from error


def _load(path: Path, **settings: Any) -> Any:
    with torch.serialization.safe_globals(types_of_numpy()):
        return torch.load(path, **(settings | {"weights_only": True}))


def _reason(error: pickle.UnpicklingError) -> str:
    """The line of torch's long message that names what was refused."""
    found = re.search(r"Unpickler error:\s*(.*)", str(error))
    return (found[1] if found else str(error)).partition(". Please use")[0]
