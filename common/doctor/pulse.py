"""The thread of a watched rank that shows how far the script is, and stops it where the doctor wants that."""

import os
import sys
import threading
import time
from pathlib import Path

from common.doctor.folder import Files
from common.doctor.script_line import script_line
from common.doctor.watcher import Watcher

PULSE = 0.2  # seconds


def start(watcher: Watcher, files: Files, script: Path) -> None:
    """Start the thread. The caller is the thread that will run the script."""
    arguments = (watcher, files, script, threading.get_ident(), os.getppid())
    threading.Thread(target=_beat, args=arguments, name="doctor", daemon=True).start()


def _beat(watcher: Watcher, files: Files, script: Path, thread: int, doctor: int) -> None:
    record = watcher.record
    shown = -1
    while os.getppid() == doctor:
        time.sleep(PULSE)
        if files.stop.exists():
            _stop(watcher, files, script, thread, doctor)
        if record.ended is None and watcher.events != shown:
            shown = watcher.events
            files.progress.write_text(f"{shown} {record.steps}")
    os._exit(1)  # nobody will read the record


def _stop(watcher: Watcher, files: Files, script: Path, thread: int, doctor: int) -> None:
    """Write where the script is, and wait to be killed.

    A rank that ended at once could break the connection of another one before this has noted its own line. The lock
    stays taken, so that nothing that the script meets from now on comes into the record.
    """
    with watcher.lock:
        place = script_line(sys._current_frames().get(thread), script)
        if place is not None:
            watcher.record.line = place.line
            watcher.record.called = place.called
        watcher.finish("stopped")
        files.stopped.touch()
        while os.getppid() == doctor:
            time.sleep(PULSE)
        os._exit(1)
