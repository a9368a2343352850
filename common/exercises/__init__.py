"""Exercises in code, and what checks a solution: on real processes, against the small abstraction.

Each module but `mistake`, `compare`, `stage` and `traffic` is the checker of an exercise:

    MINUTES         that the exercise takes about
    READ            the page to read first, from the root of the repository
    SAME_AS         what the solution is compared with
    WORLD_SIZES     numbers of ranks; who passes on the first is checked on the next
    CASES           arguments of the next two, if there are several, by their title
    Facts           what is compared
    reference()     the facts on a rank where all is right, mostly by the small abstraction
    attempt(path)   the same facts of the solution in the file `path`
    finding(made, expected)     the first mistake, None if there is none; a field of these facts is a list of all ranks'

`mistakes.toml` says what a learner is told of each mistake. The file of the same name in `starters` has the task in its
docstring, and gaps where the learner writes.
"""

import ast
import functools
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from common.exercises.mistake import Mistake, SolutionFailed
from common.exercises.stage import on_ranks

NAMES = (
    "average_gradients",
    "overlapped_ddp",
    "buckets",
    "ring_all_reduce",
    "exact_evaluation",
    "accumulate",
    "zero1",
    "prepare",
)
ONE_CASE: dict[str, dict[str, Any]] = {"on {} ranks": {}}


class Facts(NamedTuple):
    """What was done on a rank, and what is right there: the checker's own `Facts`."""

    made: Any
    expected: Any


def check(name: str, path: Path) -> Mistake | None:
    """The mistake of the solution in `path`, on the first number of ranks and in the first case; None if it passed.

    Only a solution that was right on one number of ranks comes to the next. So what is wrong then is mostly a number
    that was written where the world size or the rank belongs.

    Raises:
        ValueError: if there is no such exercise, or no such file.
    """
    checker = module(name)
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    passed_on = None
    for world_size in checker.WORLD_SIZES:
        mistake = _first_mistake(name, world_size, path)
        if mistake and passed_on:
            return Mistake("fixed world size", f"all was right on {passed_on} ranks", mistake.explained(name))
        if mistake:
            return mistake
        passed_on = world_size
    return None


def _first_mistake(name: str, world_size: int, path: Path) -> Mistake | None:
    """The mistake of a solution on one number of ranks, in the first case that has one."""
    checker = module(name)
    for title, case in getattr(checker, "CASES", ONE_CASE).items():
        try:
            of_ranks = on_ranks(world_size, functools.partial(_facts, name, case), path)
        except SolutionFailed as failure:
            return failure.mistake.at(title.format(world_size))
        made = _by_field([facts.made for facts in of_ranks])
        expected = _by_field([facts.expected for facts in of_ranks])
        mistake = checker.finding(made, expected)
        if mistake:
            return mistake.at(title.format(world_size))
    return None


def _facts(name: str, case: dict[str, Any], path: str) -> Facts:
    """The facts of this rank."""
    checker = module(name)
    expected = checker.reference(**case)
    return Facts(checker.attempt(path, **case), expected)


def _by_field(of_ranks: list[Any]) -> Any:
    """The facts of all ranks in one: a field is the list of the ranks' values."""
    kind = type(of_ranks[0])
    fields = zip(*of_ranks, strict=True)
    return kind(*map(list, fields))


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
