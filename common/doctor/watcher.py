"""The watcher of one rank: it guards the observers, shows that the script gets on, and writes the record."""

import functools
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from common.doctor.record import Record, write

PULSE = 0.2  # seconds
ALWAYS = 256  # records that are written where they are wanted: ranks that differ do so early
STOP = "stop"  # the file by which `launch` stops all ranks
STOPPED = "rank{}.stopped"  # the file by which a rank says that its last record is written
WRAPPERS = ("noted", "wrapper")  # ours, and torch's, around each collective
_INSTALLED = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_LIBRARIES = ("<", *_INSTALLED, str(Path(__file__).parents[1]))


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


class Watcher:
    """The observations of this process.

    Args:
        folder: for its files.
        rank: of this process.
        script: the program that is watched.
        last_step: the optimizer step after which the process ends; None: the script's own end.
    """

    def __init__(self, folder: Path, rank: int, script: Path, last_step: int | None = None) -> None:
        self.record = Record(rank)
        self.last_step = last_step
        self.gradients = True  # the script wants them, at the event that is observed
        self._folder = folder
        self._script = str(script)
        self._events = 0
        self._process = os.getpid()
        self._doctor = os.getppid()
        self._thread = threading.current_thread()
        self._lock = threading.RLock()
        self._records = 0

    def start(self) -> None:
        threading.Thread(target=self._beat, name="doctor", daemon=True).start()

    def observer(self, function: Callable[..., None]) -> Callable[..., None]:
        """An observer that runs in the script's own thread only, not in its loader workers, and never fails it."""

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> None:
            if os.getpid() != self._process or threading.current_thread() is not self._thread:
                return
            gradients = torch.is_grad_enabled()
            with self._lock, torch.no_grad():
                self.gradients = gradients
                self._events += 1
                try:
                    if self.record.backend is None and dist.is_initialized():
                        self.record.backend = dist.get_backend()
                    function(*args, **kwargs)
                except Exception as error:  # it is ours, and not the script's: the report names it
                    trouble = f"{function.__name__}: {type(error).__name__}: {error}"
                    if trouble not in self.record.troubles:
                        self.record.troubles.append(trouble)

        return guarded

    def watch(
        self, owner: Any, name: str, before: Callable[..., None] = _nothing, after: Callable[..., None] = _nothing
    ) -> None:
        """Let each call of `owner.name` be noted: `before(*arguments)`, then `after(result, *arguments)`."""
        call = getattr(owner, name)
        note_before = self.observer(before)
        note_after = self.observer(after)

        @functools.wraps(call)
        def noted(*args: Any, **kwargs: Any) -> Any:
            note_before(*args, **kwargs)
            result = call(*args, **kwargs)
            note_after(result, *args, **kwargs)
            return result

        setattr(owner, name, noted)

    def keep(self) -> None:
        """Write the record, unless that was often done: the next line of the script may abort the process."""
        if self._records < ALWAYS:
            self._write()

    def finish(self, ended: str) -> None:
        """Write the record for the last time."""
        with self._lock:
            self.record.ended = ended
            self._write()

    def place(self, frame: FrameType | None) -> list[str]:
        """The innermost line that is of the script, or of no library, and the functions called from there."""
        called: list[str] = []
        while frame is not None:
            file = frame.f_code.co_filename
            if file == self._script or not file.startswith(_LIBRARIES):
                return [f"{Path(file).name}:{frame.f_lineno}", *called]
            if frame.f_code.co_name not in WRAPPERS:
                called = [frame.f_code.co_name, *called]
            frame = frame.f_back
        return []

    def _beat(self) -> None:
        """Write how far the script is, and stop where `launch` wants it."""
        events = -1
        while os.getppid() == self._doctor:
            time.sleep(PULSE)
            if (self._folder / STOP).exists():
                self._stop()
            if self.record.ended is None and self._events != events:
                events = self._events
                (self._folder / f"rank{self.record.rank}.progress").write_text(f"{events} {self.record.steps}")
        os._exit(1)  # nobody will read the record

    def _stop(self) -> None:
        """Write where the script is, and wait to be killed.

        A rank that ended at once could break the connection of another one before this has noted its own place. The
        lock stays taken, so that nothing that the script meets from now on comes into the record.
        """
        with self._lock:
            frame = sys._current_frames().get(self._thread.ident or 0)
            self.record.place = self.place(frame)
            self.finish("stopped")
            (self._folder / STOPPED.format(self.record.rank)).touch()
            while os.getppid() == self._doctor:
                time.sleep(PULSE)
            os._exit(1)

    def _write(self) -> None:
        write(self.record, self._folder / f"rank{self.record.rank}.pickle")
        self._records += 1
