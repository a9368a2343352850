"""The moments at which a run saves, and what has to hold around them: a lock, signals, one line for a full disk.

At every step all ranks must decide alike whether to save. The number of the step is the same on all ranks; a signal or
a clock is not. So the ranks ask each other every few steps, by an all-reduce of two numbers. The steps in between cost
nothing. On a GPU the CPU reads the result at the next exchange, because by then it does not have to wait for it.

SIGTERM and Ctrl-C lead to a checkpoint: all ranks save at the same step, and leave in good order. Slurm and Kubernetes
send SIGTERM and kill half a minute later. torchrun hands it on to its ranks, which get it at different steps; or only
one of them gets it at all. The exit code is 128 + the signal's number, as that of a process that the signal ended. The
training is not complete, and this exit code says so to whatever restarts failed jobs: a Kubernetes Job, or torchrun
with restarts allowed when one rank got the signal.
"""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from filelock import FileLock, Timeout

from common.accelerator.checkpointing import CheckpointError, RemoteError, file_names_of, has_checkpoints
from common.args import CheckpointInterval
from common.errors import fail
from common.process_group import broadcast_object, get_rank, is_distributed
from common.run.metrics import DeferredRead

STEPS_BETWEEN_EXCHANGES = 10  # optimizer steps
# Seconds for the ranks to agree on a step. A rank must not wait for ever for another one, which may be dead.
PATIENCE = 20
SIGNALS = (signal.SIGTERM, signal.SIGINT)


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
        # True if the time was up in the last answer, and another answer is under way that was asked for before it.
        self._time_was_up = False

    def can_resume(self, prefix: str, subfolder: str = "") -> bool:
        """True on all ranks if rank 0 finds a checkpoint, whole or damaged. A collective: all processes must call it.

        Rank 0 decides for all: a process on another machine may not see its disk, and a rank that begins anew beside
        one that resumes would leave it waiting.

        Args:
            prefix: what stands before the number in a checkpoint's name, for example "checkpoint_". Folders that were
                set aside as damaged have another name.
        """
        if self.folder is None:
            return False
        return broadcast_object(has_checkpoints(self.folder / subfolder, prefix))

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

    def _exchange(self) -> None:
        # Filled in place: torch.tensor(…, device=…) would wait for the GPU.
        answer = torch.zeros(2, dtype=torch.int64, device=self._device)
        answer[0].fill_(self.preemption.received)
        answer[1].fill_(self._seconds_are_over())
        dist.all_reduce(answer, dist.ReduceOp.MAX)
        answer_before = self._answer_in_flight
        self._answer_in_flight = DeferredRead(answer)
        arrived = self._answer_in_flight if self._device.type == "cpu" else answer_before
        if arrived is not None:
            signal_number, time_is_up = arrived.tolist()
            # A GPU's answer comes one exchange late. What was asked in between knew nothing of the checkpoint.
            is_stale = self._time_was_up
            time_is_up = bool(time_is_up) and not is_stale
            self._time_was_up = time_is_up and arrived is answer_before
            self._take_answer(signal_number, time_is_up)

    def _seconds_are_over(self) -> bool:
        return time.monotonic() - self._interval_began >= self.interval.seconds

    def _take_answer(self, signal_number: int, time_is_up: bool) -> None:
        """Take over what all ranks know now."""
        if signal_number:
            self.preemption.agree_on(signal_number)
        self._time_is_up = time_is_up
        if time_is_up:
            self._interval_began = time.monotonic()

    def is_due(self, step: int, total_steps: int) -> bool:
        """True on all ranks if they are to save a checkpoint after `step` of `total_steps`."""
        if self.folder is None:
            return False
        is_last = step == total_steps
        return is_last or self.is_preempted or self._time_is_up or step % self.interval.steps == 0

    @property
    def is_preempted(self) -> bool:
        """True on all ranks if they stop after the next checkpoint."""
        return self.preemption.agreed > 0

    def report_saved(self, step: int) -> None:
        """Say once, above a progress bar if there is one, that the checkpoint of `step` is complete."""
        from tqdm import tqdm

        if get_rank() == 0:
            tqdm.write(f"saved at step {step} in {self.folder}")

    def exit_if_preempted(self, step: int) -> None:
        """After a checkpoint: say once that the run has stopped, and end the process, if a signal has asked for it.

        The next run resumes from there.
        """
        if not self.is_preempted:
            return
        number = self.preemption.agreed
        if get_rank() == 0:
            name = signal.Signals(number).name
            print(f"stopped at step {step} by {name}: run it again to continue", flush=True)
        raise SystemExit(128 + number)


class Preemption:
    """The signal that this process got, and the one that all ranks stop for.

    Attributes:
        received: the number of the first signal that this process got while it listened, or 0.
        agreed: the number of the signal that all ranks stop for, or 0. Whoever has asked all ranks sets it.
    """

    def __init__(self) -> None:
        self.received = 0
        self.agreed = 0
        self._settled = threading.Event()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Within the block the signals are noted. In a thread, which gets no signals, nothing changes.

        If the ranks do not agree on a step within PATIENCE seconds, as during a long evaluation, the process ends.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        receiving_end, sending_end = socket.socketpair()
        sending_end.setblocking(False)
        handlers = {number: signal.signal(number, _ignore) for number in SIGNALS}
        previous_wakeup_fd = signal.set_wakeup_fd(sending_end.fileno(), warn_on_full_buffer=False)
        # In a thread, because no handler written in Python runs while the main thread waits in a collective.
        listener = threading.Thread(target=self._listen, args=(receiving_end,), daemon=True)
        listener.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(previous_wakeup_fd)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            self._settled.set()
            # Not by `close` alone: loader workers are forks and hold copies, and an error keeps them alive.
            sending_end.shutdown(socket.SHUT_RDWR)
            sending_end.close()
            listener.join()
            receiving_end.close()

    def _listen(self, receiving_end: socket.socket) -> None:
        while received := receiving_end.recv(1):
            number = received[0]
            # Ctrl-C comes twice, from the terminal and from torchrun: the second one is no new signal.
            if number not in SIGNALS or self.received:
                continue
            self.received = number
            if not self._settled.wait(PATIENCE):
                os._exit(128 + number)

    def agree_on(self, number: int) -> None:
        """All ranks know that they stop for the signal `number`."""
        self.agreed = number
        self._settled.set()


def _ignore(*_: Any) -> None:
    """In place of ending the process: the number of the signal arrives at the wakeup file descriptor."""


@contextlib.contextmanager
def checkpoint_session(args: Any, device: torch.device) -> Iterator[Checkpointing]:
    """Within the block `--checkpoint-dir` belongs to this job, and SIGTERM and Ctrl-C lead to a checkpoint in it.

    All processes must enter the block. Without the flag it changes nothing.

    Args:
        args: of `common.args.parse_args`.
        device: of this process.

    Raises:
        UserError: in place of an error about the files, see `file_errors_in_one_line`.
    """
    if args.checkpoint_dir is None:
        yield Checkpointing(None, args.checkpoint_every, device)
        return
    folder = Path(args.checkpoint_dir)
    checkpoints = Checkpointing(folder, args.checkpoint_every, device)
    with checkpoint_lock(folder), file_errors_in_one_line(folder), checkpoints.preemption.listening():
        yield checkpoints


@contextlib.contextmanager
def checkpoint_lock(folder: Path) -> Iterator[None]:
    """Within the block `folder` belongs to this job alone. A collective: all processes must enter it.

    Rank 0 holds the lock, which ends with its process, however that ends. Loader workers may outlive a killed rank,
    but they do not inherit it.

    Raises:
        UserError: on every rank, if another job of this machine has the folder, or if it cannot be written to.
    """
    lock = FileLock(folder / ".lock")
    problem = None
    if get_rank() == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire(blocking=False)
        except Timeout:
            problem = f"another job is saving to {folder}: wait for it, or name another --checkpoint-dir"
        except OSError as error:
            problem = f"--checkpoint-dir cannot be written to: {error}"
    problem = broadcast_object(problem)
    if problem:
        fail(problem)
    try:
        yield
    finally:
        lock.release()  # does nothing on the other ranks


@contextlib.contextmanager
def file_errors_in_one_line(folder: Path) -> Iterator[None]:
    """Within the block a full disk, a damaged checkpoint and the like end this process in one line.

    These are the errors of type CheckpointError, and OSErrors about a path in `folder`, on this rank or on another one.
    All other errors are mistakes in a program and keep their traceback: the other ranks show that of the RemoteError
    which quotes the mistake.

    Raises:
        UserError: in place of such an error.
    """
    try:
        yield
    except (CheckpointError, OSError, RemoteError) as error:
        is_about_folder = any(Path(name).is_relative_to(folder) for name in file_names_of(error))
        if not (is_about_folder or isinstance(error, CheckpointError)):
            raise
        text = str(error)
        fail(text if str(folder) in text else f"{folder}: {text}")
