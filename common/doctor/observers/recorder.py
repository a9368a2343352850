"""The recorder of one rank: it wraps functions, guards the observers, and keeps the record that they fill."""

import functools
import os
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from common.doctor.record import End, Reason, Record, write

Observe = Callable[..., None]


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


class Recorder:
    def __init__(self, path: Path, rank: int) -> None:
        self.record = Record(rank)
        self.events = 0  # calls of observers; while the number grows, the script makes progress
        self.lock = threading.RLock()  # held while the record is changed or written
        self._path = path
        self._process = os.getpid()
        self._thread = threading.current_thread()

    def guarded(self, observe: Observe) -> Observe:
        """An observer that runs in the script's own thread only, not in its loader workers, and never fails it."""

        @functools.wraps(observe)
        def guarded(*args: Any, **kwargs: Any) -> None:
            if os.getpid() != self._process or threading.current_thread() is not self._thread:
                return
            with self.lock:
                self.events += 1
                try:
                    observe(*args, **kwargs)
                except Exception as error:  # a fault of the doctor: the script goes on, and the report names it
                    where = traceback.extract_tb(error.__traceback__)[-1].name
                    self.record.observer_errors.setdefault(f"{where}: {type(error).__name__}", str(error))

        return guarded

    def wrap(
        self, owner: Any, name: str, before: Observe = _nothing, after: Observe = _nothing, failed: Observe = _nothing
    ) -> None:
        """Replace the function `owner.name` by one that also calls observers.

        They are called as `before(*arguments)`, then `after(result, *arguments)` if the function has returned, or
        `failed(error, *arguments)` if it has raised.
        """
        original = getattr(owner, name)
        # `_nothing` is guarded too: so the return of each function is an event, and a collective that ends is progress.
        before = self.guarded(before)
        after = self.guarded(after)
        failed = self.guarded(failed)

        @functools.wraps(original)
        def observed(*args: Any, **kwargs: Any) -> Any:
            before(*args, **kwargs)
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                failed(error, *args, **kwargs)
                raise
            after(result, *args, **kwargs)
            return result

        setattr(owner, name, observed)

    def finish(self, reason: Reason, text: str = "") -> None:
        with self.lock:
            self.record.end = End(reason, text)
            self.record.waits_in = ""
            self.write()

    def write(self) -> None:
        """Write the record as it is, with the backend once there is a process group. The caller has the lock."""
        if self.record.backend is None and dist.is_initialized():
            self.record.backend = dist.get_backend()
        write(self.record, self._path)
