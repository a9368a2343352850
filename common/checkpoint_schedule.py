"""The steps at which all ranks of a long training save, and the one at which they stop.

All ranks have to save at the same step, but a signal may reach one rank only, and clocks differ. So every few steps the
ranks combine what they know in one small all-reduce. Slurm and Kubernetes send SIGTERM and kill half a minute
later; torchrun hands it on to its ranks, and Ctrl-C reaches them as SIGINT.
"""

import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from common.errors import fail
from common.numbers import number, positive
from common.process_group import all_gather_object

STEPS_BETWEEN_VOTES = 10  # optimizer steps


class CheckpointInterval(NamedTuple):
    """The optimizer steps or the seconds between two checkpoints; the one that is not given is never reached."""

    steps: int = sys.maxsize
    seconds: float = math.inf


def checkpoint_interval(text: str) -> CheckpointInterval:
    """The value of --checkpoint-every: "100" are steps, and "60s" are seconds."""
    if not text.endswith("s"):
        return CheckpointInterval(steps=positive(text))
    description = "a whole number of steps, or of seconds with an s behind it as in 60s,"
    return CheckpointInterval(seconds=number(text.removesuffix("s"), int, 1, description, 10**9))


def has_checkpoint(folder: str, pattern: str) -> bool:
    """True if a path in `folder` matches. Rank 0 looks, so that all ranks resume or none does: all must call this."""
    saved = Path(folder).glob(pattern)
    found = any(not path.suffix for path in saved)  # one that was set aside has ".damaged" behind its number
    return all_gather_object(found)[0]


def refuse_not_finite(model: nn.Module, step: int) -> None:
    """Raise UserError if a weight is NaN or infinite: a checkpoint of such a model would replace a good one."""
    are_finite = [parameter.isfinite().all() for parameter in model.parameters()]
    if not all(are_finite):
        fail(f"the model's weights are not finite at step {step}: no checkpoint is made of them")


@contextlib.contextmanager
def noted_signals(enabled: bool = True) -> Iterator[list[int]]:
    """A block in which SIGTERM and the first Ctrl-C do not end the process: their numbers are added to the list.

    The second Ctrl-C ends the process at once. A second SIGTERM does not, because Slurm and torchrun may both send one.
    Unless `enabled`, signals do what they always do, and the list stays empty.
    """
    received: list[int] = []
    if not enabled:
        yield received
        return
    sent_by_one_key_press = 1
    if "TORCHELASTIC_RUN_ID" in os.environ:
        sent_by_one_key_press = 2  # one by the terminal, to torchrun and to its ranks, and one by torchrun

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if received.count(signal.SIGINT) >= sent_by_one_key_press:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # This ends also a process that waits in a collective.

    before = {}
    for caught in (signal.SIGTERM, signal.SIGINT):
        before[caught] = signal.signal(caught, note)
    try:
        yield received
    finally:
        for caught, handler in before.items():
            signal.signal(caught, handler)


class CheckpointSchedule:
    """The decision after each optimizer step: do all ranks save now, and do they stop after that?

    Args:
        interval: how often to save.
        total_steps: the last step, which is saved too.
        signals: of `noted_signals`; if a rank has got one, all save and stop.
        device: of this process.

    Attributes:
        save, stop: True on all ranks or on none.
    """

    def __init__(
        self, interval: CheckpointInterval, total_steps: int, signals: list[int], device: torch.device
    ) -> None:
        self.save = False
        self.stop = False
        self._interval = interval
        self._total_steps = total_steps
        self._signals = signals
        self._device = device
        self._saved_at = time.monotonic()

    def update(self, step: int) -> None:
        """Decide after optimizer step `step`. A collective: all processes must call it at every step."""
        self.save = step == self._total_steps or step % self._interval.steps == 0
        if step % STEPS_BETWEEN_VOTES == 0:
            is_time = time.monotonic() - self._saved_at > self._interval.seconds
            votes = torch.tensor([is_time, bool(self._signals)], dtype=torch.int32, device=self._device)
            if dist.is_initialized():
                dist.all_reduce(votes, dist.ReduceOp.MAX)
            is_time, has_signal = votes.bool().tolist()
            self.stop = has_signal
            self.save = self.save or is_time or has_signal
        if self.save:
            self._saved_at = time.monotonic()

    def exit_code(self) -> int:
        """128 + the number of the signal, which shells and schedulers take for a process that the signal has ended."""
        return 128 + (self._signals[0] if self._signals else signal.SIGTERM)
