"""Record what every thread of a rank does in a step that averages gradients, and in a step of a level.

The spans come from torch's profiler, which sees the phases that `AveragedTraining` names, every node of autograd's
graph, and every all-reduce on the thread of gloo that runs it. A communication hook would see less: it takes the place
of the path that is to be shown.
"""

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from itertools import pairwise
from typing import Any, NamedTuple
from unittest.mock import patch

from torch import Tensor
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.harness import level_runs
from benchmarks.harness.gradient_averaging import warmed_up
from benchmarks.harness.spans import (
    ALL_REDUCE,
    BACKWARD,
    COPIES,
    FORWARD,
    OPTIMIZER,
    SENDING,
    WAITING,
    Span,
    intervals,
)
from common.model import BasicNet
from common.process_group import process_group
from common.small import data_parallel

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


class Event(NamedTuple):
    """What the profiler saw, in seconds by its own clock."""

    start: float
    end: float
    name: str
    thread: int


def steps_of(events: list, began: float) -> list[RecordedStep]:
    """The steps that the profiler saw; the first began at `began`, which ties the profiler's clock to the machine's."""
    seen = _in_order(events)
    steps = [event for event in seen if event.name == "step"]
    recorded = []
    for step in steps:
        after_the_first = step.start - steps[0].start
        spans = _spans(_within(step, seen), step.start)
        recorded.append(RecordedStep(began + after_the_first, step.end - step.start, spans))
    return recorded


def _in_order(events: list) -> list[Event]:
    seen = []
    for event in events:
        seen.append(Event(event.time_range.start / 1e6, event.time_range.end / 1e6, event.name, event.thread))
    return sorted(seen)


def _within(outer: Event, events: list[Event]) -> list[Event]:
    return [event for event in events if outer.start <= event.start < outer.end]


def _spans(events: list[Event], zero: float) -> list[Span]:
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


def _last_gradient(events: list[Event]) -> float:
    """The end of computing in a backward, if all-reduces have not ended then; else infinity, because nobody waits."""
    last_gradient = max(event.end for event in events if event.name.startswith(NODE_OF_AUTOGRAD))
    is_waiting = any(event.name == SENT_BY_GLOO and event.end > last_gradient for event in events)
    return last_gradient if is_waiting else math.inf


# What a level calls in a step, by the name of the phase; the profiler names the optimizer's step itself.
PHASES = (
    (BasicNet, "forward", FORWARD),
    (Tensor, "backward", BACKWARD),
    (data_parallel, "replicate", COPIES),
    (data_parallel, "scatter", COPIES),
    (data_parallel, "gather", COPIES),
)
STEP_OF_OPTIMIZER = "Optimizer.step"
SHORT = 0.001  # seconds without an operator: what is longer is no Python, but waiting


def record_level(script: str, argv: list[str], threads: int) -> list[list[RecordedStep]]:
    """The steps of a level's own script but for the first, of each device that this process computes on."""
    every_thread = _ExperimentalConfig(profile_all_threads=True)
    with ExitStack() as stack:
        for owner, method, phase in PHASES:
            stack.enter_context(patch.object(owner, method, _named(phase, getattr(owner, method))))
        profiler = stack.enter_context(profile(activities=[ProfilerActivity.CPU], experimental_config=every_thread))
        level_runs.train(script, argv, threads)
    zero = profiler.profiler.kineto_results.trace_start_ns() / 1e9
    return steps_of_devices(_in_order(profiler.events()), zero)


def _named(phase: str, function: Callable) -> Callable:
    @wraps(function)
    def named(*args: Any, **kwargs: Any) -> Any:
        with record_function(phase):
            return function(*args, **kwargs)

    return named


def steps_of_devices(seen: list[Event], zero: float) -> list[list[RecordedStep]]:
    """The steps of each device: one in a rank, and one for each of DataParallel's threads.

    A step lasts from the end of the optimizer's step before it to the end of its own. The main thread is device 0's.
    """
    updates = [event for event in seen if event.name.startswith(STEP_OF_OPTIMIZER)]
    main = updates[0].thread
    replicas = sorted({event.thread for event in seen if event.name == FORWARD} - {main})
    devices: list[list[RecordedStep]] = [[] for _ in replicas or [main]]
    for before, update in pairwise(updates):
        seconds = update.end - before.end
        inside = [event for event in seen if before.end <= event.start < update.end]
        messages = [event for event in inside if event.name.startswith("gloo:")]
        for number, steps in enumerate(devices):
            threads = replicas[number : number + 1]
            if number == 0:
                threads = [main, *threads]
            own = [event for event in inside if event.thread in threads]
            spans = _computing_and_waiting(own, before.end, seconds)
            spans += [Span(SENDING, "gloo", each.start - before.end, each.end - before.end) for each in messages]
            steps.append(RecordedStep(zero + before.end, seconds, spans))
    return devices


def _computing_and_waiting(events: list[Event], zero: float, seconds: float) -> list[Span]:
    """The phases of a step while their operators run, and the waiting between, in a step that began at `zero`."""
    computing = []
    for phase in events:
        name = OPTIMIZER if phase.name.startswith(STEP_OF_OPTIMIZER) else phase.name
        if name in (FORWARD, BACKWARD, COPIES, OPTIMIZER):
            operators = [event for event in _within(phase, events) if event.name.startswith("aten::")]
            lengthened = [Span(name, MAIN, each.start - zero, each.end - zero + SHORT) for each in operators]
            computing += [Span(name, MAIN, start, end - SHORT) for start, end in intervals(lengthened, name)]
    computing.sort(key=lambda span: span.start)
    spans = []
    ended = 0.0
    for span in [*computing, Span(WAITING, MAIN, seconds, seconds)]:
        if span.start - ended > SHORT:
            spans.append(Span(WAITING, MAIN, ended, span.start))
        if span.name != WAITING:
            spans.append(span)
        ended = max(ended, span.end)
    return spans
