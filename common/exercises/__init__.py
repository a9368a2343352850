"""Exercises in code, and what checks a solution: on real processes, against the small abstraction.

Each module but `compare`, `stage` and `traffic` is the checker of an exercise:

    MINUTES         that the exercise takes about
    READ            the page to read first, from the root of the repository
    SAME_AS         what the solution is compared with
    WORLD_SIZES     numbers of ranks; who passes on the first is checked on the next
    CASES           arguments of `run`, if there are several, by the beginning of a finding
    run(path)       runs the solution in the file `path` on a rank, and returns numbers
    finding(results)         what is wrong with the numbers of all ranks; None if nothing is
    why_it_hangs(places)     an idea, if there is one, about ranks that wait in these places

The file of the same name in `starters` has the task in its docstring, and gaps where the learner writes.
"""

import ast
from importlib import import_module
from pathlib import Path
from types import ModuleType

from common.exercises.stage import first_finding

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


def check(name: str, path: Path) -> str | None:
    """What is wrong with the solution in `path`; None if it has passed.

    Raises:
        ValueError: if there is no such exercise, or no such file.
    """
    checker = module(name)
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    return first_finding(checker, path)


def module(name: str) -> ModuleType:
    """The checker of an exercise.

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
