"""A mistake of a solution, as its learner reads it."""

from collections.abc import Mapping, Sequence
from typing import Any


class Mistake(Exception):
    """A sentence that says what is wrong or what to do, and below it numbers that show it, by their titles."""

    def __init__(self, sentence: str, numbers: Mapping[str, Any] | None = None) -> None:
        lines = [f"    {title}: {shown(value)}" for title, value in (numbers or {}).items()]
        super().__init__("\n".join([sentence, *lines]))


def by_rank(values: Sequence[Any]) -> dict[str, Any]:
    """Numbers for a Mistake: those of each rank."""
    return {f"rank {rank}": value for rank, value in enumerate(values)}


def shown(value: Any) -> str:
    """A short text for numbers and lists of them."""
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    return str(value)
