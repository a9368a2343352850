"""Files of `torch.save` that are loaded without executing code. A file that could not be loaded is refused at once."""

import codecs
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torch.utils.serialization import config

from .checkpoint_manifest import CheckpointError


def types_of_numpy() -> list[Any]:
    """The types and functions that `torch.load` needs for numbers and arrays of NumPy. None of them executes code.

    Learning rates and schedulers often hold such numbers, and so does the state of NumPy's generator.
    """
    try:
        import numpy
    except ImportError:
        return []
    make_array = numpy.empty(0).__reduce__()[0]
    make_number = numpy.float64(0).__reduce__()[0]
    codes = "?" + numpy.typecodes["AllInteger"] + numpy.typecodes["AllFloat"]  # "?" is a bool
    types_of_numbers = [type(numpy.dtype(code)) for code in codes]
    return [make_array, make_number, numpy.ndarray, numpy.dtype, *types_of_numbers, codecs.encode, bytes]


def save_loadable(obj: Any, path: Path) -> None:
    """`torch.save(obj, path)`, and a check that `load_safely(path)` can read the file.

    torch's own checksums are off, because they take time, and the manifest has others.

    Raises:
        CheckpointError: if the file cannot be loaded; it is there nevertheless.
    """
    # The file is opened here, because torch's own message about a full disk is "unexpected pos 576 vs 534".
    with config.patch("save.compute_crc32", False), path.open("wb") as file:  # type: ignore[attr-defined]
        torch.save(obj, file)
    # With mmap, only the descriptions of the tensors are read, and not the tensors.
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
        # torch's message is long. Only this line of it names what was refused.
        found = re.search(r"Unpickler error:\s*(.*?)(\. Please use|\n|$)", str(error))
        reason = found[1] if found else error
        raise CheckpointError(f"{path.name} is refused, for it could execute code: {reason}") from error
