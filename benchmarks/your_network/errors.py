"""What goes wrong with a network of somebody else's."""

import sysconfig
import traceback
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_INSTALLED = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_NOT_THE_USERS = ("<", *_INSTALLED, str(_ROOT / "benchmarks"), str(_ROOT / "common"))


class StepFailed(Exception):
    """A step of somebody's network that failed, in one line: what failed, and why."""


def described(error: Exception) -> str:
    """The error in one line, with the innermost line of the user's own code."""
    message = str(error).strip().partition("\n")[0]
    text = f"{type(error).__name__}: {message}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(_NOT_THE_USERS):
            return f"{text} ({Path(frame.filename).name}, line {frame.lineno})"
    return text
