"""The outcomes of two runs, compared bit for bit; and files that are damaged."""

import hashlib
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

ABSENT = "ABSENT"  # Stands for what one of the two does not have.
# Endings of the names of times, which differ from run to run.
TIMINGS = ("_runtime", "_per_second", "_preparation_time")


def differences(ours: Any, theirs: Any, place: str = "") -> Iterator[str]:
    """The places at which two nests of dicts and lists differ in a bit, written as in "epochs.0.loss.3"."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in ours | theirs:
            yield from differences(ours.get(key, ABSENT), theirs.get(key, ABSENT), f"{place}.{key}".lstrip("."))
    elif isinstance(ours, (list, tuple)) and type(ours) is type(theirs):
        for index, (one, other) in enumerate(zip_longest(ours, theirs, fillvalue=ABSENT)):
            yield from differences(one, other, f"{place}.{index}".lstrip("."))
    elif not _same_bits(ours, theirs):
        yield place


def _same_bits(ours: Any, theirs: Any) -> bool:
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, Tensor):
        return with_digests(ours) == with_digests(theirs)
    if isinstance(ours, float):
        return repr(ours) == repr(theirs)  # `==` takes -0.0 for 0.0, and a nan for another number
    return ours == theirs


def with_digests(outcome: Any) -> Any:
    """The same nest with a text of its type, shape and bits for each tensor."""

    def text(tensor: Tensor) -> str:
        return f"{tensor.dtype} {tuple(tensor.shape)} {digest(tensor)}"

    return tree_map_only(Tensor, text, outcome)


def digest(*tensors: Tensor) -> str:
    content = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().cpu().flatten()
        content.update(flat.view(torch.uint8).numpy().tobytes())
    return content.hexdigest()


def number_as_text(value: Any) -> Any:
    """A number of a log as text, so that NaN equals NaN. Anything else stays as it is.

    This is more lenient than `differences`: the libraries log 0 and 0.0 for one value, and both have the same text.
    """
    return repr(float(value)) if isinstance(value, int | float) else value


def without_timings(logs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sorted(logs.items()) if not name.endswith(TIMINGS)}


def comparable(logs: dict[str, Any]) -> dict[str, Any]:
    return {name: number_as_text(value) for name, value in without_timings(logs).items()}


def comparable_logs(log_history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [comparable(entry) for entry in log_history]


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])
