"""The three possible answers of a check: a mistake, no mistake, or no verdict."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """A mistake: what was counted or measured, and what to do. `pitfall` names the pitfall that explains it."""

    text: str
    advice: str
    pitfall: str | None = None


@dataclass(frozen=True)
class NotExamined:
    """No verdict of a check, and the reason: there was nothing to examine, or it may be meant as it is."""

    reason: str
    failed: bool = False  # True if it is a fault of the doctor's own


@dataclass(frozen=True)
class Right:
    """A check that has found no mistake."""


Answer = Finding | NotExamined | Right


def overall(answers: list[Answer], reason_if_none: str) -> Answer:
    """One answer for several epochs or networks: the first Finding, else the first NotExamined, else Right."""
    for kind in (Finding, NotExamined, Right):
        for answer in answers:
            if isinstance(answer, kind):
                return answer
    return NotExamined(reason_if_none)
