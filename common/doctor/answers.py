"""The answers of the checks: a finding with its number, a healthy number, or why nothing could be seen."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """A mistake: what was counted or measured, and what to do.

    Attributes:
        pitfall: the page of the lab that explains it, if there is one.
        why: the explanation, where no page has it; without one and without a page nothing is known of the cause.
    """

    text: str
    advice: str
    pitfall: str | None = None
    why: str | None = None


@dataclass(frozen=True)
class Healthy:
    """A thing that was looked at and found right."""

    text: str


@dataclass(frozen=True)
class Unseen:
    """A thing that could not be looked at in this run."""

    text: str


Answer = Finding | Healthy | Unseen
