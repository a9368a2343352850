"""Spans of time in one step, in lanes, and what one can compute from them.

A device has a lane for what it computes, and one for each thread by which gloo sends its messages. Spans of one lane do
not overlap; spans of different lanes may. All times of lanes are in milliseconds, as in records.
"""

from collections.abc import Iterable
from itertools import groupby, product
from typing import NamedTuple

ALL_REDUCE = "all-reduce"
BACKWARD = "backward"
FORWARD = "forward"
COPIES = "copies"
OPTIMIZER = "optimizer"
SENDING = "sending"
WAITING = "waiting"
# The functions that take the steps name their phases by `record_function`. torch names the optimizer's step itself.
PHASES = (FORWARD, BACKWARD, COPIES, OPTIMIZER)
COMPUTING_LANE = "main thread"  # The lane has this name in records, also where a replica computes on another thread.


class Span(NamedTuple):
    """An activity in a lane, from `start` to `end` in milliseconds since the step began."""

    name: str
    lane: str
    start: float
    end: float


class RecordedStep(NamedTuple):
    """The spans of one step of one process. `began` is by a clock that all processes of a machine share."""

    began: float
    duration: float
    spans: list[Span]


def join(pieces: Iterable[tuple[float, float]], gap: float = 0.0) -> list[tuple[float, float]]:
    """The pieces in order; those that overlap, or have no more than `gap` between them, become one."""
    joined: list[tuple[float, float]] = []
    for start, end in sorted(pieces):
        if joined and start <= joined[-1][1] + gap:
            start, end_before = joined.pop()
            end = max(end_before, end)
        joined.append((start, end))
    return joined


def count_backwards(spans: list[Span]) -> int:
    """The number of backwards in a step. One that waits has several spans; between two backwards lies a forward."""
    names = [span.name for span in spans if span.name in (FORWARD, BACKWARD)]
    return sum(name == BACKWARD for name, _ in groupby(names))


def hidden_share(spans: list[Span]) -> float:
    """The share of the all-reduces' time that lies within backward; 0 where there is no all-reduce."""
    backwards = join((span.start, span.end) for span in spans if span.name == BACKWARD)
    all_reduces = join((span.start, span.end) for span in spans if span.name == ALL_REDUCE)
    sending = sum(end - start for start, end in all_reduces)
    hidden = 0.0
    for (start, end), (backward_start, backward_end) in product(all_reduces, backwards):
        hidden += max(0.0, min(end, backward_end) - max(start, backward_start))
    return hidden / sending if sending else 0.0
