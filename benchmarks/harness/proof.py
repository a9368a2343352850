"""Proof that the levels are comparable: runs of their own train.py, and the distance between the weights they leave.

`train`, `peaks` and `held` are jobs for a rank of `common.processes`, and return what this rank has to say.
"""

import contextlib
import functools
import io
import math
import zlib
from collections.abc import Sequence

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from common import ladder
from common.args import parse_args
from common.instruments import prepare_process
from common.memory import accounting

ACCOUNTED_STEPS = 3  # DDP has its final buckets from the second step on
FEW = ["--eval-samples", "100"]
SIMULATED = ["--device", "cpu", "--max-steps", str(ACCOUNTED_STEPS), *FEW]
STATE = ("parameters", "gradients", "optimizer state")
load = functools.cache(ladder.load)


def train(level: str, flags: Sequence[str], threads: int) -> dict:
    """The result of the level; what it prints is left out."""
    module = load(level)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        args = prepare_process(parse_args(module.__file__, flags))
        if not args.cores_per_device:
            torch.set_num_threads(threads)
        return module.train(args)


def peaks(level: str, flags: list[str], threads: int) -> list[dict[str, int]]:
    """The bytes on each device that this process stands for, the rank's or all replicas', at its peak.

    They are simulated on the CPU, on machines with GPUs too: replicas that share a GPU would be charged to it together,
    and the threads of `nn.DataParallel` are not seen.
    """
    with accounting() as ledger:
        train(level, [*flags, *SIMULATED], threads)
    return list(ledger.peaks().values())


def held(level: str, flags: Sequence[str], threads: int) -> dict[str, int]:
    """The bytes of parameters, gradients and optimizer state on this rank when the optimizer has taken its last step.

    What a rank gathers of the others' it has given back by then.
    """
    moments = []
    with accounting() as ledger:
        hook = register_optimizer_step_post_hook(lambda *_: moments.append(ledger.now()))
        train(level, [*flags, *SIMULATED], threads)
        hook.remove()
    return {category: moments[-1][category] for category in STATE}


def farthest(weights: dict, others: dict) -> float:
    """The largest absolute difference between two state dicts; infinite where one is not a number.

    ValueError is raised where their keys differ.
    """
    different = sorted(weights.keys() ^ others.keys())
    if different:
        raise ValueError(f"only one of two networks has {', '.join(different)}")
    largest = 0.0
    for name, weight in weights.items():
        difference = (weight - others[name]).abs().max().item()
        if math.isnan(difference):
            return math.inf
        largest = max(largest, difference)
    return largest


def checksum(weights: dict) -> str:
    """CRC-32 of the weights rounded to 1e-4, far above the rounding errors of float64: equal runs show equal digits."""
    crc = 0
    for name in sorted(weights):
        rounded = (weights[name] * 1e4).round().long()
        crc = zlib.crc32(rounded.numpy().tobytes(), crc)
    return f"{crc:08x}"
