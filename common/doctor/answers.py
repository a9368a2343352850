"""The answers of the checks: a mistake, a reason why nothing could be seen, or that all is right."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """A mistake: what was counted or measured, and what to do. `pitfall` names the pitfall that explains it."""

    text: str
    advice: str
    pitfall: str | None = None


@dataclass(frozen=True)
class Unseen:
    """A thing that could not be looked at in this run."""

    reason: str


@dataclass(frozen=True)
class Right:
    """A thing that was looked at, and in which nothing is wrong."""


Answer = Finding | Unseen | Right


def overall(answers: Iterable[Answer], unseen: str) -> Answer:
    """One answer to a question that was asked of several epochs, or of several networks.

    It is the first mistake; without one Right, where some of them could be looked at; else why they could not. `unseen`
    is the reason if there are none.
    """
    result: Answer = Unseen(unseen)
    for answer in answers:
        if isinstance(answer, Finding):
            return answer
        if not isinstance(result, Right):
            result = answer
    return result
