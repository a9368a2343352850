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


@dataclass(frozen=True)
class Failed(NotExamined):
    """A check with a fault of the doctor's own."""


@dataclass(frozen=True)
class Right:
    """A check that has found no mistake."""


Answer = Finding | NotExamined | Right


def overall(answers: Iterable[Answer], reason: str) -> Answer:
    """One answer for several epochs or networks: the first Finding, else Right if any, else the last NotExamined.

    `reason` is why nothing was examined if there are no answers.
    """
    result: Answer = NotExamined(reason)
    for answer in answers:
        if isinstance(answer, Finding):
            return answer
        if not isinstance(result, Right):
            result = answer
    return result
