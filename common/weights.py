"""Comparison of weights: the largest difference of two tensors or of two trainings, and a checksum of a training."""

import math
import zlib

import torch
from torch import Tensor


def max_difference(one: Tensor, other: Tensor) -> float:
    """The largest difference of the numbers of two tensors of one shape: 0 for two nans, infinite for one nan."""
    if one.shape != other.shape:
        raise ValueError(f"tensors of the shapes {tuple(one.shape)} and {tuple(other.shape)} cannot be compared")
    if one.numel() == 0:
        return 0.0
    if one.dtype in (torch.bool, torch.uint8):  # which cannot be subtracted, or not below 0
        one = one.double()
        other = other.double()
    equal = (one == other) | (one.isnan() & other.isnan())
    differences = (one - other).abs().masked_fill(equal, 0.0)
    return differences.nan_to_num(nan=math.inf, posinf=math.inf).max().item()


def max_weight_difference(weights: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    """The largest difference between the tensors of two state dicts. Raises ValueError if keys or shapes differ."""
    different = sorted(weights.keys() ^ others.keys())
    if different:
        raise ValueError(f"only one of two networks has {', '.join(different)}")
    return max(max_difference(weight, others[name]) for name, weight in weights.items())


def checksum(weights: dict[str, Tensor]) -> str:
    """CRC-32 of the weights rounded to 1e-4, far above float64's rounding errors.

    So equal runs nearly always show equal digits: only a weight right at a boundary may be rounded otherwise.
    """
    crc = 0
    for name in sorted(weights):
        rounded = (weights[name] * 1e4).round().long()
        crc = zlib.crc32(rounded.numpy().tobytes(), crc)
    return f"{crc:08x}"
