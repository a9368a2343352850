"""Failures in somebody else's code, each in one line."""

import contextlib
import os
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_FOLDERS = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_FOLDERS += [str(_ROOT / "benchmarks"), str(_ROOT / "common")]
# A file name such as <string> or <frozen runpy> is nobody's.
_NOT_THE_USERS = ("<", *[folder + os.sep for folder in _FOLDERS])


class StepFailed(Exception):
    """A step of somebody's network failed; the message is one line that says what failed, and why."""


@contextlib.contextmanager
def failing_as(what: str) -> Iterator[None]:
    """A block that runs somebody's code. What it raises becomes a StepFailed that begins with `what`."""
    try:
        yield
    except StepFailed:  # its message says already what failed
        raise
    except Exception as error:
        raise StepFailed(f"{what}: {described(error)}") from error


def described(error: Exception) -> str:
    """The error in one line, with the innermost line of the user's own code."""
    message = str(error).strip().partition("\n")[0]
    text = f"{type(error).__name__}: {message}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(_NOT_THE_USERS):
            return f"{text} ({Path(frame.filename).name}, line {frame.lineno})"
    return text
