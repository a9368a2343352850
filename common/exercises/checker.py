"""The checker of an exercise: three functions that compare a solution with what is right."""

from collections.abc import Callable
from typing import Any, NamedTuple

from common.exercises.mistake import Mistake

ONE_CASE: dict[str, dict[str, Any]] = {"on {} ranks": {}}


class Checker(NamedTuple):
    """A checker. The first two functions run on each rank, and return facts of one type, a NamedTuple.

    Attributes:
        reference: `reference(**case)` returns the facts of code that is right, mostly of the small abstraction.
        attempt: `attempt(path, **case)` returns the facts of the solution in the file `path`.
        finding: `finding(made, expected)` returns the first mistake, if any. Fields are lists of all ranks' facts.
        world_sizes: numbers of ranks; a solution that passes on the first is checked on the next.
        cases: arguments of the first two, by a title in which {} is the number of ranks.
    """

    reference: Callable[..., Any]
    attempt: Callable[..., Any]
    finding: Callable[[Any, Any], Mistake | None]
    world_sizes: tuple[int, ...] = (2, 3)
    cases: dict[str, dict[str, Any]] = ONE_CASE
