"""Spans of time in one step, in lanes, and what one can compute from them.

A lane is one thread of one rank. Spans of one lane do not overlap, because a thread does one thing at a time; spans of
different lanes may.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

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

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Stretch(NamedTuple):
    """A stretch of time, in seconds."""

    start: float
    end: float


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


class Process(NamedTuple):
    """The spans of one process, as a trace shows them."""

    title: str
    spans: list[Span]


def chrome_trace(processes: list[Process]) -> dict[str, Any]:
    """The trace event format that https://ui.perfetto.dev and chrome://tracing open.

    Source: Trace Event Format, by Google; times are in microseconds.
    """
    events: list[dict[str, Any]] = []
    for process_id, process in enumerate(processes, start=1):
        events.append(_name_of("process_name", process.title, process_id, 0))
        lanes = list(dict.fromkeys(span.lane for span in process.spans))
        thread_ids = {lane: index for index, lane in enumerate(lanes, start=1)}
        for lane, thread_id in thread_ids.items():
            events.append(_name_of("thread_name", lane, process_id, thread_id))
        for span in process.spans:
            event = {
                "ph": "X",  # a complete event: begin and duration
                "name": span.name,
                "cat": "step",
                "ts": round(1e6 * span.start, 1),
                "dur": round(1e6 * span.seconds, 1),
                "pid": process_id,
                "tid": thread_ids[span.lane],
            }
            events.append(event)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _name_of(kind: str, title: str, process_id: int, thread_id: int) -> dict[str, Any]:
    """A metadata event, which names a process or a thread."""
    return {"ph": "M", "name": kind, "pid": process_id, "tid": thread_id, "args": {"name": title}}
