"""Record what each device does in a step of a level's own script.

A level does not name its phases, so the functions that it calls in a step are wrapped while it is recorded. Within a
phase a device computes while an operator runs on one of its threads, and else waits. The rule of `record_averaging`,
the end of autograd's last node, would miss that DataParallel and FSDP also wait in forward. All messages are called
sending, because FSDP gathers and scatters too:

    phases       |----- forward -----|-------- backward --------|- optimizer -|
    operators     ## #### ####        ####### ##         ### ###  ## ## ## ##
    spans        |-- forward --|wait |-backward-| wait  |-backw-|- optimizer -|
    gloo                                   |--- sending ---|
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from itertools import pairwise
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.harness import level_runs
from benchmarks.harness.lanes.profiler_events import Event, in_order, within
from benchmarks.harness.lanes.spans import (
    BACKWARD,
    COPIES,
    FORWARD,
    MAIN,
    OPTIMIZER,
    SENDING,
    WAITING,
    RecordedStep,
    Span,
    join,
)
from common.model import BasicNet
from common.small import data_parallel

# What a level calls in a step, by the name of the phase; the profiler names the optimizer's step itself.
PHASES = (
    (BasicNet, "forward", FORWARD),
    (Tensor, "backward", BACKWARD),
    (data_parallel, "replicate", COPIES),
    (data_parallel, "scatter", COPIES),
    (data_parallel, "gather", COPIES),
)
STEP_OF_OPTIMIZER = "Optimizer.step"
# In seconds. Between two operators Python runs for less, so what is longer is waiting.
SHORTEST_WAIT = 0.001


def record_level(script: str, argv: list[str], threads: int) -> list[list[RecordedStep]]:
    """The steps of a level's own script but for the first, of each device that this process computes on."""
    every_thread = _ExperimentalConfig(profile_all_threads=True)
    with ExitStack() as stack:
        for owner, method, phase in PHASES:
            stack.enter_context(patch.object(owner, method, _named(phase, getattr(owner, method))))
        profiler = stack.enter_context(profile(activities=[ProfilerActivity.CPU], experimental_config=every_thread))
        level_runs.train(script, argv, threads)
    zero = profiler.profiler.kineto_results.trace_start_ns() / 1e9
    return steps_of_devices(in_order(profiler.events()), zero)


def _named(phase: str, function: Callable) -> Callable:
    @wraps(function)
    def named(*args: Any, **kwargs: Any) -> Any:
        with record_function(phase):
            return function(*args, **kwargs)

    return named


def steps_of_devices(seen: list[Event], zero: float) -> list[list[RecordedStep]]:
    """The steps of each device: one in a rank, and one for each of DataParallel's replicas.

    A step lasts from the end of the optimizer's step before it to the end of its own.
    """
    updates = [event for event in seen if event.name.startswith(STEP_OF_OPTIMIZER)]
    threads_of_devices = _threads_of_devices(seen, updates[0].thread)
    devices: list[list[RecordedStep]] = [[] for _ in threads_of_devices]
    for before, update in pairwise(updates):
        began = before.end
        seconds = update.end - began
        inside = [event for event in seen if began <= event.start < update.end]
        sending = []
        for event in inside:
            if event.name.startswith("gloo:"):
                sending.append(Span(SENDING, "gloo", event.start - began, event.end - began))
        for steps, threads in zip(devices, threads_of_devices, strict=True):
            computing = _computing([event for event in inside if event.thread in threads], began)
            waiting = [Span(WAITING, MAIN, start, end) for start, end in gaps_between(computing, seconds)]
            main_spans = sorted(computing + waiting, key=lambda span: span.start)
            steps.append(RecordedStep(zero + began, seconds, main_spans + sending))
    return devices


def _threads_of_devices(seen: list[Event], main: int) -> list[set[int]]:
    """The threads of each device: a replica's forward has one of its own; all else is on the main one, device 0's."""
    replicas = sorted({event.thread for event in seen if event.name == FORWARD} - {main})
    devices = [{thread} for thread in replicas] or [set()]
    devices[0].add(main)
    return devices


def _computing(events: list[Event], zero: float) -> list[Span]:
    """The phases of a step that began at `zero`, while their operators run."""
    spans = []
    for phase in events:
        name = OPTIMIZER if phase.name.startswith(STEP_OF_OPTIMIZER) else phase.name
        if name in (FORWARD, BACKWARD, COPIES, OPTIMIZER):
            operators = [event for event in within(phase, events) if event.name.startswith("aten::")]
            running = join(((each.start - zero, each.end - zero) for each in operators), gap=SHORTEST_WAIT)
            spans += [Span(name, MAIN, start, end) for start, end in running]
    return sorted(spans, key=lambda span: span.start)


def gaps_between(spans: list[Span], end: float) -> list[tuple[float, float]]:
    """The intervals from 0 to `end` in which none of the spans is under way, in order, without the shorter ones."""
    gaps = []
    free_from = 0.0
    for span in spans:
        if span.start - free_from > SHORTEST_WAIT:
            gaps.append((free_from, span.start))
        free_from = max(free_from, span.end)
    if end - free_from > SHORTEST_WAIT:
        gaps.append((free_from, end))
    return gaps
