"""The thread of a watched rank that shows whether the script makes progress, and its line where it makes none."""

import os
import sys
import sysconfig
import threading
import time
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from common.doctor.recorder import Recorder

INTERVAL = 0.2  # seconds
PROGRESS = "progress"  # in the folder of the rank: the number of events until now
WRAPPERS = ("noted", "wrapper")  # ours, and torch's, around each collective
_INSTALLED = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_LIBRARIES = ("<", *_INSTALLED, str(Path(__file__).parents[1]))


def start(recorder: Recorder, folder: Path, script: Path) -> None:
    """Start the thread. The caller is the thread that will run the script."""
    arguments = (recorder, folder, script, threading.get_ident(), os.getppid())
    threading.Thread(target=_beat, args=arguments, name="doctor", daemon=True).start()


def _beat(recorder: Recorder, folder: Path, script: Path, thread: int, doctor: int) -> None:
    record = recorder.record
    shown = -1
    while os.getppid() == doctor:
        time.sleep(INTERVAL)
        with recorder.lock:
            place = script_line(sys._current_frames().get(thread), script)
            if record.ended is not None or place is None:
                continue
            if recorder.events != shown:
                shown = recorder.events
                record.line = ""
                (folder / PROGRESS).write_text(str(shown))
            elif record.line != place.line:  # no progress since the last beat: it may hang
                record.line = place.line
                record.called = place.called
                recorder.write()
    os._exit(1)  # nobody will read the record


class Place(NamedTuple):
    """A line, and the function that was called from there."""

    line: str
    called: str


def script_line(frame: FrameType | None, script: Path) -> Place | None:
    """The innermost line that is of the script, or of no library; None where the script has not begun."""
    called = "Python"
    while frame is not None:
        file = frame.f_code.co_filename
        if file == str(script) or not file.startswith(_LIBRARIES):
            return Place(f"{Path(file).name}:{frame.f_lineno}", called)
        if frame.f_code.co_name not in WRAPPERS:
            called = frame.f_code.co_name
        frame = frame.f_back
    return None
