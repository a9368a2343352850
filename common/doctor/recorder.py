"""The recorder of one rank: it lets observers fill the record, and its heartbeat shows where the script is.

The process runs one script and then ends. So a wrapper stays, and observers may watch the whole of torch.
"""

import functools
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from common.doctor.record import FILE, PROGRESS, End, Reason, Record, write

Observe = Callable[..., None]
INTERVAL = 0.2  # seconds between two looks at the script
_LIBRARY_FOLDERS = (
    *[sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")],
    str(Path(torch.__file__).parents[1]),  # below a user's folder, or outside of a virtual environment
    str(Path(__file__).parents[1]),  # not by the name `common`: see run_script.py
)
# With a slash, so that /x/common2 does not belong to /x/common. A "<" begins the name of code that is in no file.
_LIBRARIES = ("<", *[f"{folder}/" for folder in _LIBRARY_FOLDERS])


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


class Recorder:
    """The recorder of the rank that runs in this process. The thread that makes it will run the script."""

    def __init__(self, folder: Path, rank: int, script: Path) -> None:
        self.record = Record(rank)
        self._folder = folder
        self._script = script
        self._process = os.getpid()
        self._thread = threading.current_thread()
        self._events = 0  # calls of observers; while the number grows, the script makes progress
        self._lock = threading.RLock()  # held while the record is changed or written

    def guarded(self, observe: Observe) -> Observe:
        """An observer that runs in the script's own thread only, not in its loader workers, and never fails it."""

        @functools.wraps(observe)
        def observe_safely(*args: Any, **kwargs: Any) -> None:
            if os.getpid() != self._process or threading.current_thread() is not self._thread:
                return
            with self._lock:
                self._events += 1
                try:
                    observe(*args, **kwargs)
                except Exception as error:  # a fault of the doctor: the script goes on, and the report names it
                    where = traceback.extract_tb(error.__traceback__)[-1].name
                    self.record.observer_errors.setdefault(f"{where}: {type(error).__name__}", str(error))

        return observe_safely

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

    def finish(self, reason: Reason, text: str = "", line: str = "") -> None:
        with self._lock:
            self.record.end = End(reason, text)
            self.record.waits_in = line
            self.write()

    def write(self) -> None:
        """Write the record as it is, with the backend once there is a process group. The caller has the lock."""
        if self.record.backend is None and dist.is_initialized():
            self.record.backend = dist.get_backend()
        write(self.record, self._folder / FILE)

    def start_heartbeat(self) -> None:
        """Start a thread that shows the doctor while the script makes progress, and its line when it makes none."""
        threading.Thread(target=self._heartbeat, name="doctor", daemon=True).start()

    def _heartbeat(self) -> None:
        doctor = os.getppid()
        events = -1  # the number of them at the last progress
        next_write = 0.0
        while os.getppid() == doctor:
            time.sleep(INTERVAL)
            with self._lock:
                line = self.script_line(sys._current_frames().get(self._thread.ident))
                if self.record.end.reason is not None or line is None:
                    continue
                if self._events != events:
                    events = self._events
                    self.record.waits_in = ""
                    (self._folder / PROGRESS).touch()
                elif self.record.waits_in != line and time.monotonic() >= next_write:  # it may hang
                    seconds = self._note_wait(line)
                    next_write = time.monotonic() + 5 * seconds  # a long record slows the script down
        os._exit(1)  # nobody will read the record

    def _note_wait(self, line: str) -> float:
        """Write where the script waits, and which error it handles there. Returns the seconds that this has taken."""
        started = time.thread_time()
        handled: Any = sys._current_exceptions().get(self._thread.ident)
        error = handled[1] if isinstance(handled, tuple) else handled  # a tuple in Python 3.11
        is_failure = error is not None and not isinstance(error, StopIteration)  # a loader's end
        self.record.waits_in = line
        self.record.handles = f"{type(error).__name__}: {error}" if is_failure else ""
        self.write()
        return time.thread_time() - started

    def script_line(self, frame: FrameType | None) -> str | None:
        """The innermost line that is of the script, or of no library; None where the script has not begun."""
        while frame is not None:
            file = frame.f_code.co_filename
            if file == str(self._script) or not file.startswith(_LIBRARIES):
                return f"{Path(file).name}:{frame.f_lineno}"
            frame = frame.f_back
        return None
