"""Numbers of a solution beside those that are right: equal or not, and by which mistake."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn

from common.exercises.mistake import Mistake


def plain(value: Any) -> Any:
    """`value` as numbers and lists of numbers, which can be compared, shown and sent between processes.

    What is none of them becomes a text that says what it is.
    """
    if isinstance(value, Tensor):
        return value.detach().tolist()
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return f"a {type(value).__name__}"


def weights(module: nn.Module) -> list[list[float]]:
    """Each parameter as a list of numbers."""
    return [plain(parameter.flatten()) for parameter in module.parameters()]


def gradients(module: nn.Module) -> list[list[float] | None]:
    """The gradient of each parameter as a list of numbers; None where there is none."""
    found: list[list[float] | None] = []
    for parameter in module.parameters():
        if parameter.grad is None:
            found.append(None)
        else:
            found.append(plain(parameter.grad.flatten()))
    return found


def near(left: Any, right: Any, tolerance: float = 1e-6) -> bool:
    """Equality of numbers, or of lists of them, but for rounding errors."""
    if isinstance(left, list) and isinstance(right, list):
        if len(left) != len(right):
            return False
        return all(near(a, b, tolerance) for a, b in zip(left, right, strict=True))
    if isinstance(left, int | float) and isinstance(right, int | float):
        both_nan = math.isnan(left) and math.isnan(right)
        return both_nan or math.isclose(left, right, rel_tol=tolerance, abs_tol=tolerance / 1000)
    return left == right


def scaled(value: Any, factor: float) -> Any:
    """The number times the factor, or lists of such numbers; None stays."""
    if value is None:
        return None
    if isinstance(value, list):
        return [scaled(each, factor) for each in value]
    return factor * value


def flat(lists: Iterable[list]) -> list:
    """The entries of all lists, in one."""
    return [entry for entries in lists for entry in entries]


def at_step(of_ranks: list[list], step: int) -> list:
    """The value of each rank at a step, of lists that have one for each step."""
    return [of_rank[step] for of_rank in of_ranks]


class Gradients(NamedTuple):
    """Gradients in float64, as backward has computed them, and after they were averaged over the ranks."""

    own: list
    after: list


def wrong_means(after: list, expected: Gradients) -> Mistake | None:
    """The mistake in averaged gradients, for each rank, that are not the expected ones; None if they are."""
    world_size = len(after)
    # The order of a sum may differ, and no number may have been rounded to float32.
    if near(after, expected.after, tolerance=1e-12):
        return None
    if near(after, expected.after):
        return Mistake("rounded")
    if near(after, scaled(expected.after, world_size)):
        return Mistake("sums")
    if near(after, expected.own) or near(after, scaled(expected.own, 1 / world_size)):
        return Mistake("own gradients")
    return Mistake("no means")
