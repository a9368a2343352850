"""An exercise: what a learner is told of it, and the functions that compare a solution with what is right."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from common.exercises.mistake import Mistake

ONE_CASE: dict[str, dict[str, Any]] = {"on {} ranks": {}}


@dataclass(frozen=True)
class Exercise:
    """An exercise and its checker.

    On each rank `reference` and `attempt` return facts of one type, a NamedTuple. `finding` gets the facts of all ranks
    in one such tuple, in which each field is a list with an entry for each rank.

    Attributes:
        minutes: the time that it takes, about.
        read: the page to read first, as a path from the root of the repository.
        same_as: the code of ours that does the same, for the verdict.
        world_sizes: numbers of ranks; a solution that passes on the first is checked on the next.
        reference: `reference(**case)`, the right facts.
        attempt: `attempt(path, **case)`, the facts of the solution in the file `path`.
        finding: `finding(made, expected)`, the first mistake; None if there is none.
        cases: arguments for `reference` and `attempt`, by a title in which {} is the number of ranks.
    """

    minutes: int
    read: str
    same_as: str
    world_sizes: tuple[int, ...]
    reference: Callable[..., Any]
    attempt: Callable[..., Any]
    finding: Callable[[Any, Any], Mistake | None]
    cases: Mapping[str, dict[str, Any]] = field(default_factory=ONE_CASE.copy)
