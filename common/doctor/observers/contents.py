"""The contents of a batch: its tensors, and fingerprints of its samples, by which the samples of ranks are compared."""

import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from common.doctor.observers.tensors import spread
from common.doctor.record import NUMBERS_OF_A_FINGERPRINT, Content


def tensors_in(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        has_rows = batch.dim() > 0 and batch.layout == torch.strided and not batch.is_nested
        if has_rows:
            yield batch
    elif isinstance(batch, list | tuple):  # also a namedtuple with a field `items`
        for part in batch:
            yield from tensors_in(part)
    elif hasattr(batch, "items"):  # a dict, or what a tokenizer returns
        for _, part in batch.items():
            yield from tensors_in(part)


def count_samples(inputs: tuple, keywords: dict | None) -> int:
    """The number of samples that a network is called with: the images of a list, or the rows of the first tensor."""
    if inputs and isinstance(inputs[0], list):
        return len(inputs[0])
    return len(next(tensors_in((inputs, keywords)), ()))


def contents(batch: Any, count: int) -> list[Content]:
    """For each of `count` samples a fingerprint of each of its tensors: labels stay where images are augmented."""
    parts = batch if isinstance(batch, list | tuple) else []
    are_lists = [isinstance(part, list | tuple) and len(part) == count for part in parts]
    if parts and all(are_lists):  # a list of images of different sizes, and a list of their targets
        samples = zip(*parts, strict=True)
        found = [tuple(map(_fingerprint, tensors_in(sample))) for sample in samples]
        return found if all(found) else []
    columns: list[list[int]] = []
    for tensor in tensors_in(batch):
        count = count or len(tensor)  # in a stream the first tensor counts the samples
        if len(tensor) == count:  # else it is of the batch, and not of its samples
            columns.append([_fingerprint(row) for row in tensor])
    return list(zip(*columns, strict=True))


def _fingerprint(row: Tensor) -> int:
    values = spread(row.resolve_conj(), NUMBERS_OF_A_FINGERPRINT)
    return zlib.crc32(values.view(torch.uint8).numpy().tobytes())
