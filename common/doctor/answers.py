"""The answers of the checks: a mistake, a reason why nothing could be seen, or None where all is right."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """A mistake: what was counted or measured, and what to do. The page of the lab that explains it is `pitfall`."""

    text: str
    advice: str
    pitfall: str | None = None


@dataclass(frozen=True)
class Unseen:
    """A thing that could not be looked at in this run."""

    reason: str


Answer = Finding | Unseen | None
