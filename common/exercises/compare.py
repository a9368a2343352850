"""Numbers of a solution beside those that are right: equal or not, by which mistake, and shown rank by rank."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor


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


def in_one_row(tensor: Tensor | None) -> list | None:
    """The numbers of a tensor; None where there is no tensor."""
    return None if tensor is None else plain(tensor.flatten())


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def near(left: Any, right: Any, tolerance: float = 1e-6) -> bool:
    """Equality of numbers, or of lists of them, but for rounding errors."""
    if is_number(left) and is_number(right):
        both_nan = math.isnan(left) and math.isnan(right)
        return both_nan or math.isclose(left, right, rel_tol=tolerance, abs_tol=tolerance / 1000)
    if isinstance(left, list) and isinstance(right, list):
        if len(left) != len(right):
            return False
        return all(near(a, b, tolerance) for a, b in zip(left, right, strict=True))
    return type(left) is type(right) and left == right


def exactly(left: Any, right: Any) -> bool:
    """Equality of float64's results: the order of a sum may differ, and no number was rounded to float32."""
    return near(left, right, tolerance=1e-12)


def scaled(value: Any, factor: float) -> Any:
    """The number times the factor, or lists of such numbers."""
    if isinstance(value, list):
        return [scaled(each, factor) for each in value]
    return factor * value


def flat(lists: Iterable[list]) -> list:
    """The entries of all lists, in one."""
    return [entry for entries in lists for entry in entries]


def agreed(**references: Any) -> Any:
    """The result on which all references agree: the small abstraction's, the real one's.

    Raises:
        RuntimeError: if they do not. No solution could then be right.
    """
    results = list(references.values())
    if not all(near(result, results[0]) for result in results):
        raise RuntimeError(f"the references disagree: {references}")
    return results[0]


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


def numbers_in(value: Any) -> list:
    """The entries of lists in lists, however deep, in one."""
    if isinstance(value, list):
        return flat(map(numbers_in, value))
    return [value]


def divisors(after: Sequence[list], total: list) -> list[int] | None:
    """By what each entry of `total` was divided, if that was one whole number on all ranks.

    Args:
        after: the quotients, for each rank.
        total: the sums, each a number or a list of numbers.
    """
    found = []
    for entry, sums in enumerate(total):
        parts = numbers_in([of_rank[entry] for of_rank in after])
        if not all(map(is_number, parts)):
            return None
        if 0 in parts or not all(map(math.isfinite, parts)):
            return None
        wholes = numbers_in(sums) * len(after)
        quotients = [whole / part for whole, part in zip(wholes, parts, strict=True)]
        divisor = round(quotients[0])
        if not near(quotients, [divisor] * len(quotients)):
            return None
        found.append(divisor)
    return found


def mistake(actual: Sequence[Any], mistakes: Mapping[str, Sequence[Any]]) -> str | None:
    """The mistake that would give just these numbers on all ranks; `mistakes` has each one's by its sentence."""
    for sentence, numbers in mistakes.items():
        if near(list(actual), list(numbers)):
            return sentence
    return None
