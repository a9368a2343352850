"""The steps at which all ranks of a long training save, and the one at which they stop.

All ranks have to save at the same step, but a signal may reach one rank only, and clocks differ. So every few steps the
ranks combine what they know in one small all-reduce. Slurm and Kubernetes send SIGTERM and kill half a minute
later; torchrun hands it on to its ranks, and Ctrl-C reaches them as SIGINT.
"""

import argparse
import contextlib
import math
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist

from common.process_group import get_rank, leave_process_group

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


def checkpoint_interval(text: str) -> CheckpointInterval:
    """The value of --checkpoint-every: "100" are steps, and "60s" are seconds."""
    match = re.fullmatch("(?P<count>[1-9][0-9]{0,8})(?P<unit>s?)", text)
    if match is None:
        expected = "a whole number of steps, or of seconds as in 60s, from 1 to 999999999"
        raise argparse.ArgumentTypeError(f"must be {expected}, not {text!r}")
    count = int(match["count"])
    return CheckpointInterval(seconds=count) if match["unit"] else CheckpointInterval(steps=count)


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
            is_due = time.monotonic() - self._saved_at > self._interval.seconds
            votes = torch.tensor([is_due, bool(self._signals)], dtype=torch.int32, device=self._device)
            if dist.is_initialized():
                dist.all_reduce(votes, dist.ReduceOp.MAX)
            is_due_somewhere, stop = votes.bool().tolist()
            save = save or is_due_somewhere or stop
        if save:
            self._saved_at = time.monotonic()
        return Decision(save, stop)


@contextlib.contextmanager
def caught_signals(enabled: bool = True) -> Iterator[list[int]]:
    """A block in which SIGTERM and the first Ctrl-C do not end the process: their numbers are added to the list.

    The second Ctrl-C ends the process at once. A second SIGTERM does not, because Slurm and torchrun may both send one.
    Unless `enabled`, signals do what they always do, and the list stays empty.
    """
    received: list[int] = []
    if not enabled:
        yield received
        return
    sigints_of_one_ctrl_c = 1
    if "TORCHELASTIC_RUN_ID" in os.environ:
        sigints_of_one_ctrl_c = 2  # The terminal sends one to torchrun and to its ranks, and torchrun one to its ranks.

    def receive(signal_number: int, frame: FrameType | None) -> None:
        received.append(signal_number)
        if received.count(signal.SIGINT) >= sigints_of_one_ctrl_c:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # This ends also a process that waits in a collective.

    before = {}
    for each in (signal.SIGTERM, signal.SIGINT):
        before[each] = signal.signal(each, receive)
    try:
        yield received
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def stop_run(step: int, signals: list[int]) -> NoReturn:
    """Leave the process group and end the process. All ranks call this after a decision to stop.

    The exit code is 128 + the number of the signal, which shells and schedulers take for a process that the signal has
    ended. Where another rank has got the signal it is SIGTERM's.
    """
    if get_rank() == 0:
        print(f"stopped at step {step}: run it again to continue", flush=True)
    leave_process_group()
    signal_number = signals[0] if signals else signal.SIGTERM
    raise SystemExit(128 + signal_number)
