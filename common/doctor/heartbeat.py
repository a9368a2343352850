"""The thread of a watched rank that shows whether the script makes progress, and its line where it makes none."""

import os
import sys
import threading
import time
from pathlib import Path

from common.doctor.script_line import script_line
from common.doctor.watcher import Watcher

INTERVAL = 0.2  # seconds
PROGRESS = "progress"  # in the folder of the rank: the numbers of events and of optimizer steps until now


def start(watcher: Watcher, folder: Path, script: Path) -> None:
    """Start the thread. The caller is the thread that will run the script."""
    arguments = (watcher, folder, script, threading.get_ident(), os.getppid())
    threading.Thread(target=_beat, args=arguments, name="doctor", daemon=True).start()


def _beat(watcher: Watcher, folder: Path, script: Path, thread: int, doctor: int) -> None:
    record = watcher.record
    shown = -1
    while os.getppid() == doctor:
        time.sleep(INTERVAL)
        with watcher.lock:
            place = script_line(sys._current_frames().get(thread), script)
            if record.ended is not None or place is None:
                continue
            if watcher.events != shown:
                shown = watcher.events
                record.line = ""
                (folder / PROGRESS).write_text(f"{shown} {record.steps}")
            elif record.line != place.line:  # no progress since the last beat: it may hang
                record.line = place.line
                record.called = place.called
                watcher.write()
    os._exit(1)  # nobody will read the record
