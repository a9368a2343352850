"""SIGTERM and Ctrl-C lead to a checkpoint: all ranks save at the same step, and leave in good order.

Slurm and Kubernetes send SIGTERM and kill half a minute later. torchrun hands it on to its ranks, which get it at
different steps; or only one of them gets it at all. So the ranks must agree on a step (`common.run.checkpointing` asks
all of them every ten steps).

The exit code is 128 + the signal's number, as that of a process that the signal ended. The training is not complete,
and this exit code says so to whatever restarts failed jobs: a Kubernetes Job, or torchrun with restarts allowed when
one rank got the signal.
"""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import NoReturn

# Seconds for the ranks to agree on a step. A rank must not wait for ever for another one, which may be dead.
PATIENCE = 20
SIGNALS = (signal.SIGTERM, signal.SIGINT)


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
        handlers = _replace_handlers()
        previous_wakeup_fd = signal.set_wakeup_fd(sending_end.fileno(), warn_on_full_buffer=False)
        # In a thread, because no handler written in Python runs while the main thread waits in a collective.
        listener = threading.Thread(target=self._listen, args=(receiving_end,), daemon=True)
        listener.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(previous_wakeup_fd)
            _restore_handlers(handlers)
            self._settled.set()
            sending_end.close()
            listener.join()
            receiving_end.close()

    def _listen(self, receiving_end: socket.socket) -> None:
        while signal_number := receiving_end.recv(1):
            self._note(signal_number[0])

    def _note(self, number: int) -> None:
        # Ctrl-C comes twice, from the terminal and from torchrun: the second one is no new signal.
        if number not in SIGNALS or self.received:
            return
        self.received = number
        if not self._settled.wait(PATIENCE):
            os._exit(128 + number)

    def agree_on(self, number: int) -> None:
        """All ranks know that they stop for the signal `number`."""
        self.agreed = number
        self._settled.set()

    def exit(self, step: int, rank: int) -> NoReturn:
        """Say once that the run has stopped, and end this process."""
        if rank == 0:
            name = signal.Signals(self.agreed).name
            print(f"stopped at step {step} by {name}: run it again to continue", flush=True)
        raise SystemExit(128 + self.agreed)


def _ignore(*_) -> None:
    """In place of ending the process: the number of the signal arrives at the wakeup file descriptor."""


def _replace_handlers() -> dict:
    return {number: signal.signal(number, _ignore) for number in SIGNALS}


def _restore_handlers(handlers: dict) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)
