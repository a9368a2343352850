"""The steps at which all ranks of a long training save, and the one at which they stop.

All ranks have to save at the same step, but a signal may reach one rank only, and clocks differ. So every few steps the
ranks combine what they know in one small all-reduce: they vote.
"""

import argparse
import math
import re
import sys
import time
from typing import NamedTuple

import torch
import torch.distributed as dist

# Optimizer steps. At a vote each rank waits for its GPU and for all other ranks, so not every step has one. Ten steps,
# an evaluation that lies between them, and a checkpoint have to fit into the half minute between SIGTERM and the kill:
# lower it if steps take seconds. A signal after the last vote changes nothing, and the training runs to its end.
STEPS_BETWEEN_VOTES = 10


class CheckpointInterval(NamedTuple):
    """The optimizer steps or the seconds between two checkpoints; the one that is not given is never reached."""

    steps: int = sys.maxsize
    seconds: float = math.inf


class Decision(NamedTuple):
    """The common decision of all ranks after a step: to save a checkpoint, and to stop after that."""

    save: bool
    stop: bool


class CheckpointSchedule:
    """The steps after which all ranks save, and the step after which they stop.

    Args:
        interval: how often to save.
        total_steps: the last step, which is saved too.
        signals: of `caught_signals`; if a rank has got one, all save and stop.
        device: of this process.
    """

    def __init__(
        self, interval: CheckpointInterval, total_steps: int, signals: list[int], device: torch.device
    ) -> None:
        self._interval = interval
        self._total_steps = total_steps
        self._signals = signals
        self._device = device
        self._saved_at = time.monotonic()

    def decide(self, step: int) -> Decision:
        """The decision after optimizer step `step`. All processes must call it at every step: some steps vote."""
        save = step == self._total_steps or step % self._interval.steps == 0
        stop = False
        if step % STEPS_BETWEEN_VOTES == 0:
            is_due_here = time.monotonic() - self._saved_at > self._interval.seconds
            is_due, stop = true_on_any_rank([is_due_here, bool(self._signals)], self._device)
            save = save or is_due or stop
        if save:
            self._saved_at = time.monotonic()
        return Decision(save, stop)


def true_on_any_rank(flags: list[bool], device: torch.device) -> list[bool]:
    """For each of `flags`, True if it is true on some rank. A collective: all processes must call it."""
    votes = torch.tensor(flags, dtype=torch.int32, device=device)
    if dist.is_initialized():
        dist.all_reduce(votes, dist.ReduceOp.MAX)
    return votes.bool().tolist()


def checkpoint_interval(text: str) -> CheckpointInterval:
    """The value of --checkpoint-every: "100" are steps, and "60s" are seconds."""
    match = re.fullmatch("(?P<count>[1-9][0-9]{0,8})(?P<unit>s?)", text)
    if match is None:
        expected = "a whole number of steps, or of seconds as in 60s, from 1 to 999999999"
        raise argparse.ArgumentTypeError(f"must be {expected}, not {text!r}")
    count = int(match["count"])
    return CheckpointInterval(seconds=count) if match["unit"] else CheckpointInterval(steps=count)
