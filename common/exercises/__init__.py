"""Exercises in code, and the check of a solution: on real processes, against the small abstraction.

The files of an exercise have its name:

    NAME.py             CHECKER, the functions that check a solution (see `checker`)
    starters/NAME.py    the task as a docstring, and gaps where the learner writes
    exercises.toml      [NAME]: the time that it takes, and what to read
    mistakes.toml       [NAME]: the text that a learner reads for each mistake

The checkers share `mistake`, `compare` (numbers), `stage` (the run on ranks) and `traffic` (the messages).
"""

import ast
import functools
import tomllib
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from common.exercises.checker import Checker
from common.exercises.mistake import Mistake, SolutionFailed
from common.exercises.stage import on_ranks


class About(NamedTuple):
    """The time that an exercise takes, the page to read first, and the code with which the verdict compares it."""

    minutes: int
    read: str
    same_as: str


_TABLE = tomllib.loads(Path(__file__).with_name("exercises.toml").read_text())
EXERCISES = {name: About(**entry) for name, entry in _TABLE.items()}
NAMES = tuple(EXERCISES)


def check(name: str, path: Path) -> Mistake | None:
    """The mistake of the solution in `path`, on the first number of ranks and in the first case; None if it passed.

    A solution that is right on one number of ranks and wrong on the next mostly has a fixed number where the world size
    or the rank belongs.

    Raises:
        ValueError: if there is no such exercise, or no such file.
    """
    checker = load(name)
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    passed_on = None
    for world_size in checker.world_sizes:
        mistake = _first_mistake(name, world_size, path)
        if mistake and passed_on:
            return Mistake("fixed world size", f"all was right on {passed_on} ranks", mistake.explained(name))
        if mistake:
            return mistake
        passed_on = world_size
    return None


def _first_mistake(name: str, world_size: int, path: Path) -> Mistake | None:
    """The mistake of a solution on one number of ranks, in the first case that has one."""
    checker = load(name)
    for title, case in checker.cases.items():
        try:
            of_ranks = on_ranks(world_size, functools.partial(_facts, name, case), path)
        except SolutionFailed as failure:
            return failure.mistake.at(title.format(world_size))
        made, expected = zip(*of_ranks, strict=True)
        mistake = checker.finding(_by_field(made), _by_field(expected))
        if mistake:
            return mistake.at(title.format(world_size))
    return None


def _facts(name: str, case: dict[str, Any], path: str) -> tuple[Any, Any]:
    """The facts of the solution on this rank, and those that are right."""
    checker = load(name)
    expected = checker.reference(**case)
    return checker.attempt(path, **case), expected


def _by_field(of_ranks: Sequence[Any]) -> Any:
    """The facts of all ranks in one tuple, whose fields are lists with a value for each rank."""
    kind = type(of_ranks[0])
    fields = zip(*of_ranks, strict=True)
    return kind(*map(list, fields))


def load(name: str) -> Checker:
    """The checker of an exercise.

    Raises:
        ValueError: if there is no such exercise.
    """
    if name not in NAMES:
        raise ValueError(f"{name!r} is no exercise: one of {', '.join(NAMES)}")
    return import_module(f"{__name__}.{name}").CHECKER


def starter(name: str) -> Path:
    """The file to begin with."""
    return Path(__file__).with_name("starters") / f"{name}.py"


def task(name: str) -> str:
    """The text of the exercise, the docstring of its starter file."""
    load(name)  # raises if there is no such exercise
    return ast.get_docstring(ast.parse(starter(name).read_text())) or ""


def title(name: str) -> str:
    """The exercise in one line."""
    return task(name).partition("\n")[0]


def following(name: str) -> str | None:
    """The next exercise of the climb."""
    number = NAMES.index(name) + 1
    return NAMES[number] if number < len(NAMES) else None
