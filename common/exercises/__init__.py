"""Exercises in code, and the check of a solution: on real processes, against the small abstraction.

The files of an exercise have its name:

    NAME.py             its checker: an `Exercise`, which is named EXERCISE
    starters/NAME.py    the task as a docstring, and gaps where the learner writes
    mistakes.toml       [NAME]: the text that a learner reads for each mistake

The checkers share `exercise` (its parts), `mistake`, `compare` (numbers), `stage` (the run of a solution on ranks) and
`traffic` (its messages).
"""

import ast
import functools
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from common.exercises.exercise import Exercise
from common.exercises.mistake import Mistake, SolutionFailed
from common.exercises.stage import on_ranks

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


class RankFacts(NamedTuple):
    """The facts of the solution on a rank, and those that are right there."""

    made: Any
    expected: Any


def check(name: str, path: Path) -> Mistake | None:
    """The mistake of the solution in `path`, on the first number of ranks and in the first case; None if it passed.

    Only a solution that was right on one number of ranks comes to the next. So what is wrong then is mostly a number
    that was written where the world size or the rank belongs.

    Raises:
        ValueError: if there is no such exercise, or no such file.
    """
    exercise = load(name)
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    passed_on = None
    for world_size in exercise.world_sizes:
        mistake = _first_mistake(name, world_size, path)
        if mistake and passed_on:
            return Mistake("fixed world size", f"all was right on {passed_on} ranks", mistake.explained(name))
        if mistake:
            return mistake
        passed_on = world_size
    return None


def _first_mistake(name: str, world_size: int, path: Path) -> Mistake | None:
    """The mistake of a solution on one number of ranks, in the first case that has one."""
    exercise = load(name)
    for title, case in exercise.cases.items():
        try:
            of_ranks = on_ranks(world_size, functools.partial(_facts, name, case), path)
        except SolutionFailed as failure:
            return failure.mistake.at(title.format(world_size))
        made = _by_field([facts.made for facts in of_ranks])
        expected = _by_field([facts.expected for facts in of_ranks])
        mistake = exercise.finding(made, expected)
        if mistake:
            return mistake.at(title.format(world_size))
    return None


def _facts(name: str, case: dict[str, Any], path: str) -> RankFacts:
    """The facts of this rank."""
    exercise = load(name)
    expected = exercise.reference(**case)
    return RankFacts(exercise.attempt(path, **case), expected)


def _by_field(of_ranks: list[Any]) -> Any:
    """The facts of all ranks in one tuple, whose fields are lists with a value for each rank."""
    kind = type(of_ranks[0])
    fields = zip(*of_ranks, strict=True)
    return kind(*map(list, fields))


def load(name: str) -> Exercise:
    """The exercise with this name.

    Raises:
        ValueError: if there is no such exercise.
    """
    if name not in NAMES:
        raise ValueError(f"{name!r} is no exercise: one of {', '.join(NAMES)}")
    return import_module(f"{__name__}.{name}").EXERCISE


def starter(name: str) -> Path:
    """The file to begin with."""
    return Path(__file__).with_name("starters") / f"{name}.py"


def task(name: str) -> str:
    """The text of the exercise, the docstring of its starter file.

    Raises:
        ValueError: if there is no such exercise.
    """
    load(name)
    return ast.get_docstring(ast.parse(starter(name).read_text())) or ""


def title(name: str) -> str:
    """The exercise in one line."""
    return task(name).partition("\n")[0]


def following(name: str) -> str | None:
    """The next exercise of the climb."""
    number = NAMES.index(name) + 1
    return NAMES[number] if number < len(NAMES) else None
