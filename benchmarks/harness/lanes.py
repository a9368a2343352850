"""Record what every thread of a rank does in a step that averages gradients.

The spans come from torch's profiler, which sees the phases that `AveragedTraining` names, every node of autograd's
graph, and every all-reduce on the thread of gloo that runs it. A communication hook would see less: it takes the place
of the path that is to be shown.
"""

import time
from typing import Any, NamedTuple

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


def steps_of(events: list, began: float) -> list[RecordedStep]:
    """The steps that the profiler saw; the first began at `began`, which ties the profiler's clock to the machine's."""
    steps = sorted((event for event in events if event.name == "step"), key=_start)
    recorded = []
    for step in steps:
        within = [event for event in events if _contains(step, event)]
        after_the_first = _start(step) - _start(steps[0])
        seconds = _end(step) - _start(step)
        recorded.append(RecordedStep(began + after_the_first, seconds, _spans(within, _start(step))))
    return recorded


def _start(event: Any) -> float:
    """In seconds by the profiler's clock, which gives microseconds."""
    return event.time_range.start / 1e6


def _end(event: Any) -> float:
    return event.time_range.end / 1e6


def _contains(outer: Any, inner: Any) -> bool:
    return _start(outer) <= _start(inner) < _end(outer)


def _spans(events: list, zero: float) -> list[Span]:
    """The spans of one step that began at `zero`, from its events."""
    found = []
    for event in sorted(events, key=_start):
        start = _start(event) - zero
        end = _end(event) - zero
        if event.name in (FORWARD, OPTIMIZER):
            found.append(Span(event.name, MAIN, start, end))
        elif event.name == "average_gradients":
            found.append(Span(WAITING, MAIN, start, end))
        elif event.name == BACKWARD:
            found += _backward_and_wait(event, events, zero)
    return found + _all_reduces(events, zero)


def _backward_and_wait(backward: Any, events: list, zero: float) -> list[Span]:
    """Backward, until autograd has computed the last gradient; then the wait for all-reduces that have not ended."""
    within = [event for event in events if _contains(backward, event)]
    nodes = [event for event in within if event.name.startswith(NODE_OF_AUTOGRAD)]
    last_gradient = max(_end(node) for node in nodes)
    start = _start(backward) - zero
    end = _end(backward) - zero
    is_waiting = any(event.name == SENT_BY_GLOO and _end(event) > last_gradient for event in within)
    if not is_waiting:
        return [Span(BACKWARD, MAIN, start, end)]
    return [Span(BACKWARD, MAIN, start, last_gradient - zero), Span(WAITING, MAIN, last_gradient - zero, end)]


def _all_reduces(events: list, zero: float) -> list[Span]:
    """The all-reduces in the lanes of gloo's threads, which are numbered by their first one."""
    found = []
    lanes: dict[int, str] = {}
    for event in sorted(events, key=_start):
        if event.name == SENT_BY_GLOO:
            lane = lanes.setdefault(event.thread, f"gloo thread {len(lanes) + 1}")
            start = _start(event) - zero
            end = _end(event) - zero
            found.append(Span(ALL_REDUCE, lane, start, end))
    return found
