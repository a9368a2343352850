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
        return math.isclose(left, right, rel_tol=tolerance, abs_tol=tolerance / 1000)
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


def wrong_means(after: Sequence[list], own: Sequence[list], means: list) -> str | None:
    """A sentence about gradients that are not the means over the ranks; None if they are.

    Args:
        after: the gradients, for each rank.
        own: what backward had computed, for each rank, in float64.
        means: the right ones.
    """
    world_size = len(after)
    # The order of a sum may differ, and no number may have been rounded to float32.
    if near(list(after), [means] * world_size, tolerance=1e-12):
        return None
    mistakes = {
        "they are the sums over the ranks: divide by the world size": [scaled(means, world_size)] * world_size,
        "they are each rank's own: what is added up over the ranks has to arrive in parameter.grad": own,
        "they are each rank's own, divided by the world size: hand parameter.grad itself to all_reduce, which writes"
        " the sum into it": [scaled(of_rank, 1 / world_size) for of_rank in own],
        "they are rank 0's on every rank: copied, and not averaged": [own[0]] * world_size,
        "they are divided by the world size twice": [scaled(means, 1 / world_size)] * world_size,
        "they are rounded: give your own tensors the dtype of the gradients, here float64": [means] * world_size,
    }
    for sentence, numbers in mistakes.items():
        if near(list(after), list(numbers)):
            return sentence
    if near(after[0], means):
        return "rank 0 has them, and other ranks have not: reduce gives the sum to one rank, and all_reduce to all"
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
