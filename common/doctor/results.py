"""The three possible results of a check: a mistake, no mistake, or no verdict."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """A mistake: what was counted or measured, and what to do. `pitfall` names the pitfall that explains it."""

    text: str
    advice: str
    pitfall: str | None = None


@dataclass(frozen=True)
class Skipped:
    """No verdict, and the reason: there was nothing to examine, or it may be meant as it is."""

    reason: str
    failed: bool = False  # True if it is a fault of the doctor's own


@dataclass(frozen=True)
class Passed:
    """No mistake was found."""


Result = Finding | Skipped | Passed


def overall(results: list[Result], reason_if_none: str) -> Result:
    """One result for several epochs or networks: the first Finding, else the first Skipped, else Passed."""
    order = (Finding, Skipped, Passed)
    return min(results, key=lambda result: order.index(type(result)), default=Skipped(reason_if_none))
