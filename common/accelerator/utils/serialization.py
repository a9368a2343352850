"""Files of `torch.save` that can be loaded without executing code, which is found out when they are written."""

import codecs
import pickle
import re
from pathlib import Path
from typing import Any

import torch

from .checkpoint_manifest import CheckpointError

_TYPES_OF_NUMBERS = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128"
)


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
        CheckpointError: if it would not; the file is then there nevertheless.
        OSError: if it cannot be written. (Without the open file torch would say "unexpected pos 576 vs 534".)
    """
    has_checksums = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        with path.open("wb") as file:
            torch.save(obj, file)
    finally:
        torch.serialization.set_crc32_options(has_checksums)
    # Mapped into memory, the tensors are not read: only what describes them is.
    load_safely(path, mmap=True)


def load_safely(path: Path, **load_kwargs: Any) -> Any:
    """The object that `save_loadable` wrote to `path`, its tensors on the CPU; `load_kwargs` are for `torch.load`.

    Raises:
        CheckpointError: if the file asks for code to be executed.
    """
    settings = {**load_kwargs, "map_location": "cpu", "weights_only": True}
    try:
        with torch.serialization.safe_globals(types_of_numpy()):
            return torch.load(path, **settings)
    except pickle.UnpicklingError as error:
        # The line of torch's long message that names what was refused.
        found = re.search(r"Unpickler error:\s*(.*?)(\. Please use|\n|$)", str(error))
        reason = found[1] if found else error
        raise CheckpointError(f"{path.name} is refused, for it could execute code: {reason}") from error
