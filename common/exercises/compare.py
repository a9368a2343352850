"""Numbers of a solution beside those that are right: equal or not, by which mistake, and shown rank by rank."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn


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
    found = []
    for parameter in module.parameters():
        found.append(None if parameter.grad is None else plain(parameter.grad.flatten()))
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


def wrong_means(after: list[list], own: list[list], means: list) -> str | None:
    """A sentence about gradients that are not the means over the ranks; None if they are.

    Args:
        after: the gradients, for each rank.
        own: what backward had computed, for each rank, in float64.
        means: the right ones.
    """
    world_size = len(after)
    expected = [means] * world_size
    # The order of a sum may differ, and no number may have been rounded to float32.
    if near(after, expected, tolerance=1e-12):
        return None
    if near(after, expected):
        return "they are rounded: give your own tensors the dtype of the gradients, here float64"
    if near(after, scaled(expected, world_size)):
        return "they are the sums over the ranks: divide by the world size"
    if near(after, own) or near(after, scaled(own, 1 / world_size)):
        return "they are each rank's own: all_reduce writes the sum into the tensor that it is given, and into no other"
    return "a mean is the sum of the ranks' gradients, divided once by the world size"


def shown(value: Any) -> str:
    """A short text for numbers and lists of them."""
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    return str(value)


def side_by_side(title: str, values: Sequence[Any], **others: Any) -> str:
    """A finding: the sentence, then each rank's value under it, and then what it is compared with."""
    lines = [title]
    lines += [f"    rank {rank}: {shown(value)}" for rank, value in enumerate(values)]
    lines += [f"    {name.replace('_', ' ')}: {shown(value)}" for name, value in others.items()]
    return "\n".join(lines)
