"""The thread of a watched rank that shows how far the script is, and stops it where the doctor wants that.

The two talk by files in the folder of the rank.
"""

import os
import sys
import threading
import time
from pathlib import Path

from common.doctor.script_line import script_line
from common.doctor.watcher import Watcher

INTERVAL = 0.2  # seconds
PROGRESS = "progress"  # the numbers of events and of optimizer steps until now
STOP = "stop"  # made by the doctor
STOPPED = "stopped"  # made by the rank when its last record is written


def start(watcher: Watcher, folder: Path, script: Path) -> None:
    """Start the thread. The caller is the thread that will run the script."""
    arguments = (watcher, folder, script, threading.get_ident(), os.getppid())
    threading.Thread(target=_beat, args=arguments, name="doctor", daemon=True).start()


def _beat(watcher: Watcher, folder: Path, script: Path, thread: int, doctor: int) -> None:
    record = watcher.record
    shown = -1
    while os.getppid() == doctor:
        time.sleep(INTERVAL)
        if (folder / STOP).exists():
            _stop(watcher, folder, script, thread, doctor)
        if record.ended is None and watcher.events != shown:
            shown = watcher.events
            (folder / PROGRESS).write_text(f"{shown} {record.steps}")
    os._exit(1)  # nobody will read the record


def _stop(watcher: Watcher, folder: Path, script: Path, thread: int, doctor: int) -> None:
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
        (folder / STOPPED).touch()
        while os.getppid() == doctor:
            time.sleep(INTERVAL)
        os._exit(1)
