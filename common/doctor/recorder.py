"""The recorder of one rank: it installs wrappers, guards the observers, and keeps the record that they fill."""

import functools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from common.doctor.record import Record, write

MAX_KEEPS = 256  # ranks that differ do so early


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


class Recorder:
    """The observations of this process, and the file in which they are kept."""

    def __init__(self, path: Path, rank: int) -> None:
        self.record = Record(rank)
        self.events = 0  # calls of observers; while the number grows, the script makes progress
        self.lock = threading.RLock()  # held while the record is changed or written
        self._path = path
        self._process = os.getpid()
        self._thread = threading.current_thread()
        self._kept = 0

    def observer(self, function: Callable[..., None]) -> Callable[..., None]:
        """An observer that runs in the script's own thread only, not in its loader workers, and never fails it."""

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> None:
            if os.getpid() != self._process or threading.current_thread() is not self._thread:
                return
            with self.lock:
                self.events += 1
                try:
                    if self.record.backend is None and dist.is_initialized():
                        self.record.backend = dist.get_backend()
                    function(*args, **kwargs)
                except Exception as error:  # a fault of the doctor: the script goes on, and the report names it
                    trouble = f"{function.__name__}: {type(error).__name__}: {error}"
                    if trouble not in self.record.troubles:
                        self.record.troubles.append(trouble)

        return guarded

    def watch(
        self,
        owner: Any,
        name: str,
        before: Callable[..., None] = _nothing,
        after: Callable[..., None] = _nothing,
        at_end: Callable[..., None] = _nothing,
    ) -> None:
        """Wrap the function `owner.name`.

        Each call also calls `before(*arguments)`, and `after(result, *arguments)` when it has returned, or
        `at_end(*arguments)` when it has raised StopIteration.
        """
        call = getattr(owner, name)
        note_before = self.observer(before)
        note_after = self.observer(after)
        note_end = self.observer(at_end)

        @functools.wraps(call)
        def noted(*args: Any, **kwargs: Any) -> Any:
            note_before(*args, **kwargs)
            try:
                result = call(*args, **kwargs)
            except StopIteration:
                note_end(*args, **kwargs)
                raise
            note_after(result, *args, **kwargs)
            return result

        setattr(owner, name, noted)

    def keep(self) -> None:
        """Write the record now, because the script's next line may abort the process; after many times no more."""
        if self._kept < MAX_KEEPS:
            self._kept += 1
            self.write()

    def finish(self, ended: Literal["whole", "steps", "crash"]) -> None:
        """Write the record for the last time."""
        with self.lock:
            self.record.ended = ended
            self.record.line = ""
            self.write()

    def write(self) -> None:
        """Write the record as it is. The caller has the lock."""
        write(self.record, self._path)
