"""Record what each device of this process does in its steps, by torch's profiler.

A step lasts from the end of the optimizer's step before it to the end of its own. It has phases: forward, backward, the
optimizer's step. Within a phase a device computes while an operator runs on one of its threads; an operator outside of
all phases, which reads the batch or zeroes gradients, has no span. In the rest of the step the device waits: for
messages, for another device, or because another process has its core. Here it waits once in forward and in backward:

    phases       |----- forward -----|-------- backward --------|- optimizer -|
    operators     ## #### ####        ####### ##         ### ###  ## ## ## ##
    spans        |-- forward --|wait |-backward-| wait  |-backw-|- optimizer -|
    gloo                                   |--- sending ---|
"""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness.lanes.spans import COMPUTING_LANE, FORWARD, OPTIMIZER, PHASES, WAITING, RecordedStep, Span, join

# In milliseconds. Between two operators Python runs for less, so what is longer is waiting.
SHORTEST_WAIT = 1.0


class Event(NamedTuple):
    """An operator, a phase or a message on a thread, in milliseconds since the profiler started."""

    start: float
    end: float
    name: str
    thread: int


def record(take_steps: Callable[[], object], sending: str) -> list[list[RecordedStep]]:
    """The steps that `take_steps` takes, but for the first: for each device of this process a list of its steps.

    `sending` is the name of the spans of messages.
    """
    every_thread = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=every_thread) as profiler:
        take_steps()
    events = []
    for event in profiler.events():
        name = OPTIMIZER if event.name.startswith("Optimizer.step#") else event.name
        events.append(Event(event.time_range.start / 1e3, event.time_range.end / 1e3, name, event.thread))
    profiler_started = profiler.profiler.kineto_results.trace_start_ns() / 1e6
    return steps_of_devices(sorted(events), profiler_started, sending)


def steps_of_devices(events: list[Event], profiler_started: float, sending: str) -> list[list[RecordedStep]]:
    """The steps of each device: one in a rank, and one for each of DataParallel's replicas.

    Args:
        events: in the order in which they began.
        profiler_started: in milliseconds, by the clock that all processes of this machine share.
    """
    updates = [event for event in events if event.name == OPTIMIZER]
    threads_of_devices = _threads_of_devices(events, main=updates[0].thread)
    devices: list[list[RecordedStep]] = [[] for _ in threads_of_devices]
    for before, update in pairwise(updates):
        duration = update.end - before.end
        in_step = _within(events, before.end, update.end)
        messages = _messages(in_step, sending)
        for steps, threads in zip(devices, threads_of_devices, strict=True):
            spans = _phases_and_waiting([event for event in in_step if event.thread in threads], duration)
            steps.append(RecordedStep(profiler_started + before.end, duration, spans + messages))
    return devices


def _threads_of_devices(events: list[Event], main: int) -> list[set[int]]:
    """The threads of each device: a thread besides `main` that runs a forward is a replica's; `main` is device 0's."""
    # Assumed: the replicas' first forwards begin in the order of their devices, in which their threads are started.
    threads = dict.fromkeys(event.thread for event in events if event.name == FORWARD)
    replicas = [thread for thread in threads if thread != main]
    devices = [{thread} for thread in replicas] or [set()]
    devices[0].add(main)
    return devices


def _within(events: list[Event], start: float, end: float) -> list[Event]:
    """The events that began from `start` to `end`, with their times since `start`."""
    found = []
    for event in events:
        if start <= event.start < end:
            found.append(event._replace(start=event.start - start, end=event.end - start))
    return found


def _messages(events: list[Event], name: str) -> list[Span]:
    """Spans for the messages of a step; each of gloo's threads has a lane, numbered by their first messages."""
    lanes: dict[int, str] = {}
    spans = []
    for event in events:
        if event.name.startswith("gloo:"):
            lane = lanes.setdefault(event.thread, f"gloo thread {len(lanes) + 1}")
            spans.append(Span(name, lane, event.start, event.end))
    return spans


def _phases_and_waiting(events: list[Event], duration: float) -> list[Span]:
    """Spans for what a device does in a step of this duration; `events` are those of its threads."""
    operators = [(event.start, event.end) for event in events if event.name.startswith("aten::")]
    spans = []
    for phase in events:
        if phase.name in PHASES:
            of_phase = [(start, end) for start, end in operators if phase.start <= start < phase.end]
            for start, end in join(of_phase, gap=SHORTEST_WAIT):
                spans.append(Span(phase.name, COMPUTING_LANE, start, end))
    busy_until = 0.0
    for start, end in [*join(operators), (duration, duration)]:
        if start > busy_until + SHORTEST_WAIT:
            spans.append(Span(WAITING, COMPUTING_LANE, busy_until, start))
        busy_until = max(busy_until, end)
    return sorted(spans, key=lambda span: span.start)
