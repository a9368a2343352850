"""Record what every thread of a rank does in a step that averages gradients.

The spans come from torch's profiler, which sees the phases that `AveragedTraining` names, every node of autograd's
graph, and every all-reduce on the thread of gloo that runs it. A communication hook would see less: it takes the place
of the path that is to be shown.
"""

import math
import time
from typing import NamedTuple

from torch.profiler import ProfilerActivity, profile

from benchmarks.harness.gradient_averaging import warmed_up
from benchmarks.harness.spans import ALL_REDUCE, BACKWARD, FORWARD, OPTIMIZER, WAITING, Span
from common.process_group import process_group

MAIN = "main thread"
NODE_OF_AUTOGRAD = "autograd::engine::evaluate_function"
SENT_BY_GLOO = "gloo:all_reduce"


class RecordedStep(NamedTuple):
    """The spans of one step of one process.

    Attributes:
        began: when the step began, by the clock that all processes of a machine share, in seconds.
        seconds: how long it took.
    """

    began: float
    seconds: float
    spans: list[Span]


def record_rank(way: str, steps: int) -> list[RecordedStep]:
    """Some steps of this rank, after a warm-up; a collective of all ranks.

    Args:
        way: a key of `benchmarks.harness.gradient_averaging.WAYS`.
    """
    with process_group():
        step = warmed_up(way)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            began = time.perf_counter()
            for _ in range(steps):
                step()
        return steps_of(profiler.events(), began)


class _Event(NamedTuple):
    """What the profiler saw, in seconds by its own clock."""

    start: float
    end: float
    name: str
    thread: int


def steps_of(events: list, began: float) -> list[RecordedStep]:
    """The steps that the profiler saw; the first began at `began`, which ties the profiler's clock to the machine's."""
    seen = []
    for event in events:
        seen.append(_Event(event.time_range.start / 1e6, event.time_range.end / 1e6, event.name, event.thread))
    seen.sort()
    steps = [event for event in seen if event.name == "step"]
    recorded = []
    for step in steps:
        after_the_first = step.start - steps[0].start
        spans = _spans(_within(step, seen), step.start)
        recorded.append(RecordedStep(began + after_the_first, step.end - step.start, spans))
    return recorded


def _within(outer: _Event, events: list[_Event]) -> list[_Event]:
    return [event for event in events if outer.start <= event.start < outer.end]


def _spans(events: list[_Event], zero: float) -> list[Span]:
    """The spans of one step that began at `zero`; gloo's threads are numbered by their first all-reduce."""
    computing = []
    sending = []
    lanes: dict[int, str] = {}
    for event in events:
        start = event.start - zero
        end = event.end - zero
        if event.name in (FORWARD, OPTIMIZER):
            computing.append(Span(event.name, MAIN, start, end))
        elif event.name == "average_gradients":
            computing.append(Span(WAITING, MAIN, start, end))
        elif event.name == BACKWARD:
            last_gradient = _last_gradient(_within(event, events)) - zero
            computing.append(Span(BACKWARD, MAIN, start, min(end, last_gradient)))
            if last_gradient < end:
                computing.append(Span(WAITING, MAIN, last_gradient, end))
        elif event.name == SENT_BY_GLOO:
            lane = lanes.setdefault(event.thread, f"gloo thread {len(lanes) + 1}")
            sending.append(Span(ALL_REDUCE, lane, start, end))
    return computing + sending


def _last_gradient(events: list[_Event]) -> float:
    """The end of computing in a backward, if all-reduces have not ended then; else infinity, because nobody waits."""
    last_gradient = max(event.end for event in events if event.name.startswith(NODE_OF_AUTOGRAD))
    is_waiting = any(event.name == SENT_BY_GLOO and event.end > last_gradient for event in events)
    return last_gradient if is_waiting else math.inf
