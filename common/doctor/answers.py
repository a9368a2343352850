"""The three possible answers of a check: a mistake, no mistake, or nothing to examine."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """A mistake: what was counted or measured, and what to do. `pitfall` names the pitfall that explains it."""

    text: str
    advice: str
    pitfall: str | None = None


@dataclass(frozen=True)
class NotExamined:
    """A check that this run gave nothing to examine for, and the reason."""

    reason: str
    failed: bool = False  # True if it is a fault of the doctor's own


@dataclass(frozen=True)
class Right:
    """A check that has found no mistake."""


Answer = Finding | NotExamined | Right


def overall(answers: Iterable[Answer], reason_if_none: str) -> Answer:
    """One answer for several epochs or networks: the first Finding, else Right if any, else the last NotExamined."""
    result: Answer = NotExamined(reason_if_none)
    for answer in answers:
        if isinstance(answer, Finding):
            return answer
        if not isinstance(result, Right):
            result = answer
    return result
