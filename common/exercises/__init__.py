"""Exercises in code, and what checks a solution: on real processes, against the small abstraction and the real one.

Each module is a checker: `check(path)` runs the solution in the file `path` and returns what is wrong with it, a
sentence for each finding. A solution without findings has passed. The file of the same name in `starters` has the task
in its docstring, and gaps where the learner writes.
"""

import ast
from importlib import import_module
from pathlib import Path
from types import ModuleType

NAMES = (
    "average_gradients",
    "overlapped_ddp",
    "buckets",
    "ring_all_reduce",
    "sampler",
    "exact_evaluation",
    "accumulate",
    "zero1",
    "loss_scaler",
    "prepare",
)
STARTERS = Path(__file__).with_name("starters")


def check(name: str, path: Path) -> list[str]:
    """Findings against the solution in `path`; none if it has passed.

    Raises:
        ValueError: if there is no such exercise, or no such file.
    """
    checker = module(name)
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    return checker.check(path)


def module(name: str) -> ModuleType:
    """The checker of an exercise. It also says:

        MINUTES     that the exercise takes about
        READ        the page to read first, from the root of the repository
        SAME_AS     what the solution was compared with

    Raises:
        ValueError: if there is no such exercise.
    """
    if name not in NAMES:
        raise ValueError(f"{name!r} is no exercise: one of {', '.join(NAMES)}")
    return import_module(f"{__name__}.{name}")


def starter(name: str) -> Path:
    """The file to begin with."""
    return STARTERS / f"{name}.py"


def task(name: str) -> str:
    """The text of the exercise, the docstring of its starter file.

    Raises:
        ValueError: if there is no such exercise.
    """
    module(name)
    return ast.get_docstring(ast.parse(starter(name).read_text())) or ""


def title(name: str) -> str:
    """The exercise in one line."""
    return task(name).partition("\n")[0]


def following(name: str) -> str | None:
    """The next exercise of the climb."""
    number = NAMES.index(name) + 1
    return NAMES[number] if number < len(NAMES) else None
