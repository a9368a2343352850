"""The line of the script that a thread has come to, and what it has called from there."""

import sysconfig
from pathlib import Path
from types import FrameType
from typing import NamedTuple

WRAPPERS = ("noted", "wrapper")  # ours, and torch's, around each collective
_INSTALLED = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_LIBRARIES = ("<", *_INSTALLED, str(Path(__file__).parents[1]))


class Place(NamedTuple):
    """A line, and the names of the functions that were called from there, the outermost first."""

    line: str
    called: list[str]


def script_line(frame: FrameType | None, script: Path) -> Place | None:
    """The innermost line that is of the script, or of no library; None where the script has not begun."""
    called: list[str] = []
    while frame is not None:
        file = frame.f_code.co_filename
        if file == str(script) or not file.startswith(_LIBRARIES):
            return Place(f"{Path(file).name}:{frame.f_lineno}", called)
        if frame.f_code.co_name not in WRAPPERS:
            called.insert(0, frame.f_code.co_name)
        frame = frame.f_back
    return None
