"""What makes the levels comparable: runs of their own train.py, and the distance between the weights that they leave.

`train` and `peaks` are jobs for a rank of `benchmarks.workers`, and return what this rank has to say.
"""

import contextlib
import functools
import io
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch

from common import ladder
from common.accounting import accounting
from common.args import parse_args

ACCOUNTED_STEPS = 3  # DDP has its final buckets from the second step on
FEW = ["--eval-samples", "100"]
load = functools.cache(ladder.load)


def train(level: str, flags: Sequence[str], threads: int, path: Path | None = None) -> dict:
    """The result of the level, or of another version of it at `path`; what it prints is left out."""
    torch.set_num_threads(threads)
    module = load(level, path)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return module.train(parse_args(module.__file__, flags))


def peaks(level: str, flags: list[str], threads: int) -> list[dict[str, int]]:
    """The bytes on each device that this process stands for, the rank's or all replicas', at its peak."""
    with accounting() as ledger:
        train(level, [*flags, "--max-steps", str(ACCOUNTED_STEPS), *FEW], threads)
    return list(ledger.peaks().values())


def farthest(weights: dict, others: dict) -> float:
    """The largest absolute difference between two state dicts; infinite where one is not a number.

    ValueError is raised where their keys differ.
    """
    if different := weights.keys() ^ others.keys():
        raise ValueError(f"only one of two networks has {', '.join(sorted(different))}")
    differences = [(weights[name] - others[name]).abs().max().item() for name in weights]
    return max(difference if difference == difference else float("inf") for difference in differences)


def checksum(weights: dict) -> str:
    """CRC-32 of the weights rounded to 1e-4, far above the rounding errors of float64: equal runs show equal digits."""
    crc = 0
    for name in sorted(weights):
        crc = zlib.crc32((weights[name] * 1e4).round().long().numpy().tobytes(), crc)
    return f"{crc:08x}"
