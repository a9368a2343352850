"""Record what every thread of a step does: of a rank that averages gradients, and of DataParallel's replicas.

A rank's spans come from torch's profiler, which sees the phases that `AveragedTraining` names, every node of autograd's
graph, and every all-reduce on the thread of gloo that runs it. A communication hook would see less: it takes the place
of the path that is to be shown.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness.deep_net import CLASSES, IMAGE, DeepNet
from benchmarks.harness.gradient_averaging import BATCH, LEARNING_RATE, WARM_UP_STEPS, warmed_up
from benchmarks.harness.spans import ALL_REDUCE, BACKWARD, FORWARD, OPTIMIZER, WAITING, Span
from common.cores import available_cores
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


def record_replicas(replicas: int, steps: int) -> list[RecordedStep]:
    """Some steps of `common.small.data_parallel`'s emulation, with a batch for each replica, after a warm-up.

    Backward is one span of the main thread: autograd has one thread for all that lies on the CPU, whatever the number
    of replicas. On GPUs it has a thread for each device, and the replicas' backwards run at the same time.
    """
    torch.set_num_threads(available_cores())  # a rank of the pool has one
    torch.manual_seed(0)
    model = data_parallel.EmulatedDataParallel(DeepNet(), replicas)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    images = torch.randn(replicas * BATCH, *IMAGE)
    targets = torch.randint(CLASSES, (replicas * BATCH,))
    recorded = []
    for _ in range(WARM_UP_STEPS + steps):
        recorder = _ReplicaRecorder()
        with recorder.watching(), recorder.span("step", MAIN):
            loss = F.nll_loss(model(images), targets)
            with recorder.span(BACKWARD, MAIN):
                loss.backward()
            with recorder.span(OPTIMIZER, MAIN):
                optimizer.step()
                optimizer.zero_grad()
        recorded.append(recorder.recorded())
    return recorded[WARM_UP_STEPS:]


class _ReplicaRecorder:
    """Watches the four steps of DataParallel's forward, by the machine's clock."""

    def __init__(self) -> None:
        self._spans: list[Span] = []

    @contextmanager
    def span(self, name: str, lane: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._spans.append(Span(name, lane, start, time.perf_counter()))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it the emulation calls functions of ours, which record, and call its own."""
        originals = {name: getattr(data_parallel, name) for name in ("replicate", "scatter", "gather")}
        for name, original in originals.items():
            setattr(data_parallel, name, self._watched(name, original))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(data_parallel, name, original)

    def _watched(self, name: str, function: Callable) -> Callable:
        def watched(*args: Any) -> Any:
            with self.span(name, MAIN):
                result = function(*args)
            if name == "replicate":
                for index, replica in enumerate(result):
                    self._watch_forward(replica, index)
            return result

        return watched

    def _watch_forward(self, replica: nn.Module, index: int) -> None:
        forward = replica.forward

        def watched(images: Tensor) -> Tensor:
            with self.span(FORWARD, f"replica {index}"):
                return forward(images)

        replica.forward = watched

    def recorded(self) -> RecordedStep:
        """The step, when it has ended."""
        step = next(span for span in self._spans if span.name == "step")
        spans = []
        for span in self._spans:
            if span is not step:
                spans.append(Span(span.name, span.lane, span.start - step.start, span.end - step.start))
        return RecordedStep(step.start, step.seconds, _with_waiting(spans))


def _with_waiting(spans: list[Span]) -> list[Span]:
    """Add the main thread's wait for the replicas: from the end of `replicate` to the begin of `gather`."""
    replicated = next(span.end for span in spans if span.name == "replicate")
    gathered = next(span.start for span in spans if span.name == "gather")
    return [*spans, Span(WAITING, MAIN, replicated, gathered)]
