"""Exercises in code, and what checks a solution: on real processes, against what one device computes.

Each module is an exercise. Its docstring is the task; `check(path)` runs the solution in the file `path` and returns
what is wrong with it, a sentence for each finding. A solution without findings has passed.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

NAMES = ("average_gradients", "accumulate", "exact_evaluation")


def task(name: str) -> str:
    """The text of the exercise.

    Raises:
        ValueError: if there is no such exercise.
    """
    _check_name(name)
    return (import_module(f"{__name__}.{name}").__doc__ or "").strip()


def _check_name(name: str) -> None:
    if name not in NAMES:
        raise ValueError(f"{name!r} is no exercise: one of {', '.join(NAMES)}")


def check(name: str, path: Path) -> list[str]:
    """Findings against the solution in `path`; none if it has passed.

    Raises:
        ValueError: if there is no such exercise, or no such file.
    """
    _check_name(name)
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    checker: Callable[[Path], list[str]] = import_module(f"{__name__}.{name}").check
    return checker(path)
