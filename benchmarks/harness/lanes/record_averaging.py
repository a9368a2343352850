"""Record what every thread of a rank does in a step that averages gradients.

The spans come from torch's profiler, which sees the phases that `gradient_averaging` names, every node of autograd's
graph, and every all-reduce on the thread of gloo that runs it. A rank waits after backward's last node. The rule of
`record_level`, that a device waits while no operator runs, would be wrong here: a wrapper copies gradients between the
messages that it waits for. The spans that send are called all-reduces, because pages and titles count them.
"""

import time

from torch.profiler import ProfilerActivity, profile

from benchmarks.harness.lanes.gradient_averaging import AVERAGE_GRADIENTS, STEP, warmed_up
from benchmarks.harness.lanes.profiler_events import Event, in_order, within
from benchmarks.harness.lanes.spans import (
    ALL_REDUCE,
    BACKWARD,
    FORWARD,
    MAIN,
    OPTIMIZER,
    WAITING,
    RecordedStep,
    Span,
)
from common.process_group import process_group

NODE_OF_AUTOGRAD = "autograd::engine::evaluate_function"
SENT_BY_GLOO = "gloo:all_reduce"


def record_rank(wrapper: str, steps: int) -> list[RecordedStep]:
    """Some steps of this rank in one of `gradient_averaging.WRAPPERS`, after a warm-up; a collective of all ranks."""
    with process_group():
        step = warmed_up(wrapper)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            began = time.perf_counter()
            for _ in range(steps):
                step()
        return steps_of(profiler.events(), began)


def steps_of(events: list, began: float) -> list[RecordedStep]:
    """The steps that the profiler saw; the first began at `began`, which ties the profiler's clock to the machine's."""
    seen = in_order(events)
    steps = [event for event in seen if event.name == STEP]
    recorded = []
    for step in steps:
        after_the_first = step.start - steps[0].start
        spans = _spans(within(step, seen), step.start)
        recorded.append(RecordedStep(began + after_the_first, step.end - step.start, spans))
    return recorded


def _spans(events: list[Event], zero: float) -> list[Span]:
    """The spans of one step that began at `zero`; gloo's threads are numbered by their first all-reduce."""
    main_spans = []
    sending = []
    lanes: dict[int, str] = {}
    for event in events:
        start = event.start - zero
        end = event.end - zero
        if event.name in (FORWARD, OPTIMIZER):
            main_spans.append(Span(event.name, MAIN, start, end))
        elif event.name == AVERAGE_GRADIENTS:
            main_spans.append(Span(WAITING, MAIN, start, end))
        elif event.name == BACKWARD:
            computed = _computed_until(event, events) - zero
            main_spans.append(Span(BACKWARD, MAIN, start, computed))
            if computed < end:
                main_spans.append(Span(WAITING, MAIN, computed, end))
        elif event.name == SENT_BY_GLOO:
            lane = lanes.setdefault(event.thread, f"gloo thread {len(lanes) + 1}")
            sending.append(Span(ALL_REDUCE, lane, start, end))
    return main_spans + sending


def _computed_until(backward: Event, events: list[Event]) -> float:
    """The time of backward's last gradient, if an all-reduce is under way then; else its end, because nobody waits."""
    inside = within(backward, events)
    last_gradient = max(event.end for event in inside if event.name.startswith(NODE_OF_AUTOGRAD))
    is_waiting = any(event.name == SENT_BY_GLOO and event.end > last_gradient for event in inside)
    return min(last_gradient, backward.end) if is_waiting else backward.end
