"""Exercises in code, and what checks a solution: on real processes, against the small abstraction.

Each module but `compare`, `stage` and `traffic` is the checker of an exercise:

    MINUTES         that the exercise takes about
    READ            the page to read first, from the root of the repository
    SAME_AS         what the solution is compared with
    WORLD_SIZES     numbers of ranks; who passes on the first is checked on the next
    CASES           arguments of `run`, if there are several, by the beginning of a finding
    run(path)           runs the solution in the file `path` on a rank, and returns numbers
    finding(results)    what is wrong with the numbers of all ranks; None if nothing is

The file of the same name in `starters` has the task in its docstring, and gaps where the learner writes.
"""

import ast
import functools
from importlib import import_module
from pathlib import Path
from types import ModuleType

from common.exercises.stage import SolutionFailed, on_ranks

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


def check(name: str, path: Path) -> str | None:
    """What is wrong with the solution in `path`, on the first number of ranks and in the first case; None if it passed.

    Only a solution that was right on one number of ranks comes to the next. So what is wrong then is mostly a number
    that was written where the world size or the rank belongs.

    Raises:
        ValueError: if there is no such exercise, or no such file.
    """
    checker = module(name)
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    before = None
    for world_size in checker.WORLD_SIZES:
        for title, case in getattr(checker, "CASES", {"on {}": {}}).items():
            try:
                results = on_ranks(world_size, functools.partial(checker.run, **case), path)
                found = checker.finding(results)
            except SolutionFailed as failure:
                found = str(failure)
            if found:
                where = title.format("1 rank" if world_size == 1 else f"{world_size} ranks")
                if before:
                    where += (
                        f", after all was right on {before} (is there a {before} in your code, or another number, where"
                        " dist.get_world_size() or dist.get_rank() belongs?)"
                    )
                return f"{where}: {found}"
        before = world_size
    return None


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
    return Path(__file__).with_name("starters") / f"{name}.py"


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
