"""When a run saves, and what has to hold around it: the lock, the signals, and one line for a full disk.

At every step all ranks must decide alike whether to save. The number of the step is the same on all ranks; a signal or
a clock is not. So the ranks ask each other every few steps, by an all-reduce of two numbers. The steps in between cost
nothing. On a GPU the CPU reads the result at the next exchange, because by then it does not have to wait for it.
"""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common.args import CheckpointInterval
from common.process_group import get_rank, is_distributed
from common.run.checkpoint_folder import checkpoint_lock, file_errors_in_one_line, rank_0_finds_checkpoint
from common.run.losses import DeferredRead
from common.run.preemption import Preemption

STEPS_BETWEEN_EXCHANGES = 10  # optimizer steps


class Checkpointing:
    """Says when all ranks save a checkpoint. Without a folder they never do.

    Args:
        folder: that of `--checkpoint-dir`, or None.
        interval: how often to save.
        device: of this process, where the ranks' answers are reduced.
    """

    def __init__(self, folder: Path | None, interval: CheckpointInterval, device: torch.device) -> None:
        self.folder = folder
        self.interval = interval
        self.preemption = Preemption()
        self._device = device
        self._interval_began = time.monotonic()
        self._time_is_up = False
        self._answer_in_flight: DeferredRead | None = None

    def can_resume(self, prefix: str, subfolder: str = "") -> bool:
        """Whether rank 0 finds something to resume from; see `checkpoint_folder`. All processes must call this."""
        return self.folder is not None and rank_0_finds_checkpoint(self.folder / subfolder, prefix)

    def ask_all_ranks(self, step: int) -> None:
        """Ask, after optimizer step `step`, whether on any rank a signal has come or the time is up.

        Every STEPS_BETWEEN_EXCHANGES steps this is a collective, so all processes must call it after every step.
        """
        self._time_is_up = False  # the checkpoint that was due before has been saved
        if self.folder is None:
            return
        if not is_distributed():
            self._take_answer(self.preemption.received, self._seconds_are_over())
        elif step % STEPS_BETWEEN_EXCHANGES == 0:
            self._exchange()

    def is_due(self, step: int) -> bool:
        """Whether to save a checkpoint after `step`: the same on all ranks."""
        if self.folder is None:
            return False
        return self.is_preempted or self._time_is_up or step % self.interval.steps == 0

    @property
    def is_preempted(self) -> bool:
        """Whether all ranks stop after the next checkpoint."""
        return self.preemption.agreed > 0

    def exit_if_preempted(self, step: int) -> None:
        """After a checkpoint: end the process if a signal has asked for it. The next run resumes from there."""
        if self.is_preempted:
            self.preemption.exit(step, get_rank())

    def _exchange(self) -> None:
        if self._device.type == "cpu":
            self._read(self._send())
            return
        if self._answer_in_flight is not None:
            self._read(self._answer_in_flight)
        self._answer_in_flight = self._send()

    def _send(self) -> DeferredRead:
        """Tell the other ranks this one's answer, and start to read theirs."""
        # Filled in place: torch.tensor(…, device=…) would wait for the GPU.
        answer = torch.zeros(2, dtype=torch.int64, device=self._device)
        answer[0].fill_(self.preemption.received)
        answer[1].fill_(self._seconds_are_over())
        dist.all_reduce(answer, dist.ReduceOp.MAX)
        return DeferredRead(answer)

    def _read(self, answer: DeferredRead) -> None:
        signal_number, time_is_up = answer.tolist()
        self._take_answer(signal_number, bool(time_is_up))

    def _seconds_are_over(self) -> bool:
        return time.monotonic() - self._interval_began >= self.interval.seconds

    def _take_answer(self, signal_number: int, time_is_up: bool) -> None:
        """Take over what all ranks know now."""
        if signal_number:
            self.preemption.agree_on(signal_number)
        self._time_is_up = time_is_up
        if time_is_up:
            self._interval_began = time.monotonic()


@contextlib.contextmanager
def checkpoint_session(args: Any, device: torch.device) -> Iterator[Checkpointing]:
    """Within the block `--checkpoint-dir` belongs to this job, and SIGTERM and Ctrl-C lead to a checkpoint in it.

    All processes must enter the block. Without the flag it changes nothing.

    Args:
        args: of `common.args.parse_args`.
        device: of this process.

    Raises:
        UserError: in place of an error about the files, see `checkpoint_folder`.
    """
    if args.checkpoint_dir is None:
        yield Checkpointing(None, args.checkpoint_every, device)
        return
    folder = Path(args.checkpoint_dir)
    checkpoints = Checkpointing(folder, args.checkpoint_every, device)
    with checkpoint_lock(folder), file_errors_in_one_line(folder), checkpoints.preemption.listening():
        yield checkpoints
