"""Numbers of a solution beside those that are right, and the Mistake that shows them to the learner."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn


class Mistake(Exception):
    """A sentence that says what is wrong or what to do, and below it numbers that show it, by their titles."""

    def __init__(self, sentence: str, numbers: Mapping[str, Any] | None = None) -> None:
        lines = [f"    {title}: {shown(value)}" for title, value in (numbers or {}).items()]
        super().__init__("\n".join([sentence, *lines]))


def by_rank(values: Sequence[Any]) -> dict[str, Any]:
    return {f"rank {rank}": value for rank, value in enumerate(values)}


def shown(value: Any) -> str:
    """A short text for numbers and lists of them."""
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    return str(value)


def as_numbers(value: Any) -> Any:
    """A tensor, or a list of them, as numbers that can be compared, shown and sent between processes.

    Numbers stay. Anything else becomes its type's name.
    """
    if isinstance(value, Tensor):
        return value.detach().tolist()
    if isinstance(value, list | tuple):
        return [as_numbers(each) for each in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return type(value).__name__


def gradients(module: nn.Module) -> list:
    """The numbers of each parameter's gradient; None where there is none."""
    return [as_numbers(parameter.grad) for parameter in module.parameters()]


def near(actual: Any, right: Any, times: float = 1, tolerance: float = 1e-6) -> bool:
    """True if each number is `times` the right one, but for rounding errors. Both may be lists of numbers or lists."""
    if isinstance(actual, list) and isinstance(right, list):
        if len(actual) != len(right):
            return False
        return all(near(a, b, times, tolerance) for a, b in zip(actual, right, strict=True))
    if isinstance(actual, int | float) and isinstance(right, int | float):
        both_nan = math.isnan(actual) and math.isnan(right)
        return both_nan or math.isclose(actual, times * right, rel_tol=tolerance, abs_tol=tolerance / 1000)
    return actual == right


def flat(lists: Iterable[list]) -> list:
    return [entry for entries in lists for entry in entries]


class Gradients(NamedTuple):
    """Gradients in float64, as backward has computed them on one rank, and their means over the ranks."""

    own: list
    means: list


def check_means(subject: str, actual: list[list], expected: list[Gradients]) -> None:
    """Raise a Mistake if the gradients that a solution has averaged, by rank, are not the means."""
    world_size = len(actual)
    own = [result.own for result in expected]
    means = [result.means for result in expected]
    # The order of a sum may differ, but no number may have been rounded to float32.
    if near(actual, means, tolerance=1e-12):
        return
    if near(actual, means):
        sentence = "are rounded: give your own tensors the dtype of the gradients, here float64"
    elif near(actual, means, times=world_size):
        sentence = "are the sums over the ranks: divide by the world size"
    elif near(actual[:1], means[:1]):
        sentence = "are right on rank 0, but not on all ranks: all_reduce gives each the sum, and each divides it"
    elif near(actual, own) or near(actual, own, times=1 / world_size):
        sentence = "are each rank's own: all_reduce writes the sum into the tensor that it is given, and no other"
    else:
        sentence = "are not the means: add up the ranks' and divide once by the world size (None stays None)"
    raise Mistake(f"{subject} {sentence}", by_rank(actual) | {"backward, by rank": own, "means": means[0]})
