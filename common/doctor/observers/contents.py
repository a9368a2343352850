"""The contents of a batch: its tensors, and fingerprints of its samples, by which the samples of ranks are compared."""

import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from common.doctor.record import Content

VALUES_PER_TENSOR = 1024  # a fingerprint has so many, spread over the tensor


def tensors_in(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor) and batch.dim():
        yield batch
    elif hasattr(batch, "items"):  # a dict, or what a tokenizer returns
        for _, part in batch.items():
            yield from tensors_in(part)
    elif isinstance(batch, list | tuple):
        for part in batch:
            yield from tensors_in(part)


def contents(batch: Any) -> list[Content]:
    """For each sample a fingerprint of each of its tensors: labels stay where images are augmented."""
    columns: list[list[int]] = []
    for tensor in tensors_in(batch):
        if columns and len(tensor) != len(columns[0]):
            continue  # it is of the batch, and not of its samples
        rows = tensor.detach().unsqueeze(-1).flatten(start_dim=1)
        stride = max(1, rows.shape[1] // VALUES_PER_TENSOR)
        spread = rows[:, ::stride].cpu()
        columns.append([_fingerprint(row) for row in spread])
    return list(zip(*columns, strict=True))


def _fingerprint(row: Tensor) -> int:
    values = row
    if len(row) > 1 and row.dtype in (torch.int32, torch.int64):
        values = row[row > 0]  # without the 0 or -100 that fill up a text in a batch of longer ones
    raw_bytes = values.contiguous().view(torch.uint8)
    return zlib.crc32(raw_bytes.numpy().tobytes())
