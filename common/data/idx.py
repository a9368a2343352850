"""IDX, the file format of MNIST: read with every field checked, and written."""

import math
import struct
from pathlib import Path

import torch
from torch import Tensor

_UNSIGNED_BYTE = 0x08


class IdxError(ValueError):
    """The file is not what an IDX file of unsigned bytes with that many dimensions must be."""


def read_idx(path: Path, dimensions: int) -> Tensor:
    """The uint8 tensor in the IDX file at `path`, which must have `dimensions` dimensions.

    Raises IdxError, naming the file, for a wrong magic number and for a file that is shorter or longer than its
    header says; OSError if it cannot be read.
    """
    content = bytearray(path.read_bytes())
    header = 4 + 4 * dimensions
    if len(content) < header:
        raise IdxError(f"{path} is truncated: {len(content)} bytes, where the header alone takes {header}")
    magic, *shape = struct.unpack(f">{dimensions + 1}I", content[:header])
    expected = (_UNSIGNED_BYTE << 8) + dimensions
    if magic != expected:
        raise IdxError(f"{path} has the magic number {magic}, not {expected}: it is not the file its name promises")
    size = header + math.prod(shape)
    if len(content) != size:
        word = "truncated" if len(content) < size else "too long"
        raise IdxError(f"{path} is {word}: {len(content)} bytes, where its header promises {size}")
    if size == header:
        return torch.empty(shape, dtype=torch.uint8)
    return torch.frombuffer(content, dtype=torch.uint8, offset=header).view(shape)


def write_idx(path: Path, values: Tensor) -> None:
    """Write a uint8 tensor of any shape to `path` as an IDX file."""
    magic = (_UNSIGNED_BYTE << 8) + values.dim()
    header = struct.pack(f">{values.dim() + 1}I", magic, *values.shape)
    path.write_bytes(header + values.contiguous().numpy().tobytes())
