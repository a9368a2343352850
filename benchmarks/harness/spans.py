"""Spans of time in one step, in lanes, and what one can compute from them.

A lane is one thread of one rank. Spans of one lane do not overlap, because a thread does one thing at a time; spans of
different lanes may.
"""

from collections.abc import Iterable
from typing import NamedTuple

ALL_REDUCE = "all-reduce"
BACKWARD = "backward"
FORWARD = "forward"
OPTIMIZER = "optimizer"
WAITING = "waiting"


class Span(NamedTuple):
    """One activity: what, in which lane, and from when to when, in seconds since the step began."""

    name: str
    lane: str
    start: float
    end: float


class Stretch(NamedTuple):
    """A stretch of time, in seconds."""

    start: float
    end: float


def to_spans(lists: list[list]) -> list[Span]:
    """The spans that JSON has made lists of."""
    return [Span(*fields) for fields in lists]


def intervals(spans: Iterable[Span], name: str) -> list[Stretch]:
    """Intervals in which at least one span of this name was under way; they do not touch, and are in order."""
    own = sorted(Stretch(span.start, span.end) for span in spans if span.name == name)
    joined: list[Stretch] = []
    for interval in own:
        if joined and interval.start <= joined[-1].end:
            end = max(joined[-1].end, interval.end)
            joined[-1] = Stretch(joined[-1].start, end)
        else:
            joined.append(interval)
    return joined


def busy_seconds(spans: Iterable[Span], name: str) -> float:
    """For how long at least one span of this name was under way."""
    return sum(interval.end - interval.start for interval in intervals(spans, name))


def common_seconds(spans: list[Span], one: str, other: str) -> float:
    """For how long spans of both names were under way at the same time."""
    total = 0.0
    for ours in intervals(spans, one):
        for theirs in intervals(spans, other):
            shared = min(ours.end, theirs.end) - max(ours.start, theirs.start)
            total += max(0.0, shared)
    return total


def hidden_share(spans: list[Span]) -> float:
    """The share of the all-reduces' time that lies within backward; 0 where there is no all-reduce."""
    sending = busy_seconds(spans, ALL_REDUCE)
    if not sending:
        return 0.0
    return common_seconds(spans, BACKWARD, ALL_REDUCE) / sending
