"""What makes the levels comparable: runs of their own train.py, by processes of `benchmarks.workers`.

Each function is a job for one rank, and returns what this rank has to say.
"""

import contextlib
import io

import torch

from common import ladder
from common.accounting import accounting
from common.args import parse_args

ACCOUNTED_STEPS = 3  # DDP has its final buckets from the second step on
FEW = ["--eval-samples", "100"]


def train(level: str, flags: list[str], threads: int) -> dict:
    """The level's result; what it prints is left out."""
    torch.set_num_threads(threads)
    module = ladder.load(level)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return module.train(parse_args(module.__file__, flags))


def peaks(level: str, flags: list[str], threads: int) -> list[dict[str, int]]:
    """The bytes on each device that this process stands for, the rank's or all replicas', at its peak."""
    with accounting() as ledger:
        train(level, [*flags, "--max-steps", str(ACCOUNTED_STEPS), *FEW], threads)
    return list(ledger.peaks().values())
