"""Told to stop by SIGTERM or Ctrl-C: all ranks agree on a step, save a checkpoint there and leave in good order.

Slurm and Kubernetes send SIGTERM and kill half a minute later; torchrun hands it on to its ranks, who hear of it at
different steps or, when only one of them is told, not at all. So the ranks ask each other every EVERY steps, at the
same steps, by an all-reduce of one number; a step between costs nothing. On a GPU the answer is read EVERY steps later,
when it has long been there.

The exit code is 128 + the signal's number, as that of a process that the signal ended: the training is not complete,
and what restarts jobs that fail (a Kubernetes Job; torchrun with restarts allowed, when one rank was told) is to
restart it.
"""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import NoReturn

import torch
import torch.distributed as dist

from common.finite import Later

EVERY = 10
# Seconds for a step to be agreed on. A rank that waits for another one, which may be dead, must not wait for ever.
PATIENCE = 20
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stop:
    """Whether, and where, this run is to stop before its end.

    Attributes:
        agreed: the number of the signal that all ranks stop for, or 0.
    """

    def __init__(self, device: torch.device, rank: int, distributed: bool) -> None:
        self.device, self.rank, self.distributed = device, rank, distributed
        self.agreed = self._told = 0
        self._answer: Later | None = None
        self._settled = threading.Event()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Within the block the signals are noted. Where no step is agreed on for PATIENCE seconds, as while a long
        evaluation runs, they end the process. In a thread, which gets no signals, nothing changes."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        wire, end = socket.socketpair()
        end.setblocking(False)
        handlers = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        fd = signal.set_wakeup_fd(end.fileno(), warn_on_full_buffer=False)
        # In a thread, for no handler written in Python runs while the main one waits in a collective.
        listener = threading.Thread(target=self._listen, args=(wire,), daemon=True)
        listener.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(fd)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            self._settled.set()
            end.close()
            listener.join()
            wire.close()

    def _listen(self, wire: socket.socket) -> None:
        for (number,) in iter(lambda: wire.recv(1), b""):
            # Once: Ctrl-C comes twice, from the terminal and from torchrun.
            if number in SIGNALS and not self._told:
                self._told = number
                if not self._settled.wait(PATIENCE):
                    os._exit(128 + number)

    def here(self, step: int) -> bool:
        """Whether to save a checkpoint after `step` and stop: the same on all ranks. Call it after every step."""
        if not self.distributed:
            self.agreed = self._told
        elif step % EVERY == 0:
            before, self._answer = self._answer, self._ask()
            answer = self._answer if self.device.type == "cpu" else before
            self.agreed = answer.tolist() if answer else 0
        if self.agreed:
            self._settled.set()
        return self.agreed > 0

    def _ask(self) -> Later:
        told = torch.tensor(self._told, device=self.device)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        return Later(told)

    def leave(self, step: int) -> NoReturn:
        """Say so, once, and exit."""
        if self.rank == 0:
            print(f"stopped at step {step} by {signal.Signals(self.agreed).name}: run it again to continue", flush=True)
        raise SystemExit(128 + self.agreed)
