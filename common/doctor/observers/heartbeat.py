"""The thread of a rank that shows whether the script makes progress, and its line where it makes none."""

import os
import sys
import sysconfig
import threading
import time
from pathlib import Path
from types import FrameType

import torch

from common.doctor.observers.recorder import Recorder
from common.doctor.record import PROGRESS

INTERVAL = 0.2  # seconds
_LIBRARY_FOLDERS = (
    *[sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")],
    str(Path(torch.__file__).parents[1]),  # below a user's folder, or outside of a virtual environment
    str(Path(__file__).parents[2]),  # not by the name `common`: see run_script.py
)
# With a slash, so that /x/common2 does not belong to /x/common. A "<" begins the name of code that is in no file.
_LIBRARIES = ("<", *[f"{folder}/" for folder in _LIBRARY_FOLDERS])


def start(recorder: Recorder, folder: Path, script: Path) -> None:
    """Start a thread that looks at the script every 0.2 s. Call this on the thread that will run the script."""
    arguments = (recorder, folder / PROGRESS, script, threading.get_ident())
    threading.Thread(target=_watch, args=arguments, name="doctor", daemon=True).start()


def _watch(recorder: Recorder, progress: Path, script: Path, script_thread: int) -> None:
    record = recorder.record
    doctor = os.getppid()
    events = -1  # the number of them at the last progress
    interval = INTERVAL
    while os.getppid() == doctor:
        time.sleep(interval)
        with recorder.lock:
            line = script_line(sys._current_frames().get(script_thread), script)
            if record.end.reason is not None or line is None:
                continue
            if recorder.events != events:
                events = recorder.events
                record.waits_in = ""
                progress.touch()
            elif record.waits_in != line:  # no progress since the last look: it may hang
                started = time.thread_time()
                record.waits_in = line
                recorder.write()
                interval = max(INTERVAL, 5 * (time.thread_time() - started))  # a long record slows the script down
    os._exit(1)  # nobody will read the record


def script_line(frame: FrameType | None, script: Path) -> str | None:
    """The innermost line that is of the script, or of no library; None where the script has not begun."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file == str(script) or not file.startswith(_LIBRARIES):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return None
