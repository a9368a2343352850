"""The thread of a rank that shows whether the script makes progress, and its line where it makes none."""

import os
import sys
import sysconfig
import threading
import time
from pathlib import Path
from types import FrameType

from common.doctor.observers.recorder import Recorder
from common.doctor.record import PROGRESS

INTERVAL = 0.2  # seconds
_LIBRARY_FOLDERS = (
    *[sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")],
    str(Path(__file__).parents[2]),
)
# With a slash, so that /x/common2 does not belong to /x/common. A "<" begins the name of code that is in no file.
_LIBRARIES = ("<", *[f"{folder}/" for folder in _LIBRARY_FOLDERS])


class Heartbeat(threading.Thread):
    """A look at the script every 0.2 s. Create it on the thread that will run the script."""

    def __init__(self, recorder: Recorder, folder: Path, script: Path) -> None:
        super().__init__(name="doctor", daemon=True)
        self._recorder = recorder
        self._progress = folder / PROGRESS
        self._script = script
        self._script_thread = threading.get_ident()
        self._doctor = os.getppid()
        self._shown = -1  # the number of events at the last progress

    def run(self) -> None:
        while os.getppid() == self._doctor:
            time.sleep(INTERVAL)
            with self._recorder.lock:
                self._beat()
        os._exit(1)  # nobody will read the record

    def _beat(self) -> None:
        record = self._recorder.record
        line = script_line(sys._current_frames().get(self._script_thread), self._script)
        if record.end.reason is not None or line is None:
            return
        if self._recorder.events != self._shown:
            self._shown = self._recorder.events
            record.waits_in = ""
            self._progress.touch()
        elif record.waits_in != line:  # no progress since the last beat: it may hang
            record.waits_in = line
            self._recorder.write()


def script_line(frame: FrameType | None, script: Path) -> str | None:
    """The innermost line that is of the script, or of no library; None where the script has not begun."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file == str(script) or not file.startswith(_LIBRARIES):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return None
