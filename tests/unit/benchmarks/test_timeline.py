"""The lanes of a step: what is computed from spans, how they come from a profiler's events, and real ones."""

import pytest

from benchmarks.harness.lanes import typical_steps
from benchmarks.harness.lanes.gradient_averaging import NO_SYNC, deep_net
from benchmarks.harness.lanes.record_steps import Event, steps_of_devices
from benchmarks.harness.lanes.spans import (
    ALL_REDUCE,
    BACKWARD,
    COMPUTING_LANE,
    FORWARD,
    OPTIMIZER,
    WAITING,
    RecordedStep,
    Span,
    count_backwards,
    hidden_share,
)
from benchmarks.harness.records import read_group
from benchmarks.report import page_tables, timeline_plot
from benchmarks.suites import timeline
from common.processes import ranks

NAIVE = "naive"
OVERLAPPED = "overlapped"
BUCKETED = "bucketed, 1 MiB"
TORCH = "torch's DDP"

# Backward from 1 to 4; messages from 2 to 3 and, on two threads, from 3 to 7.
STEP = [
    Span(FORWARD, COMPUTING_LANE, 0, 1),
    Span(BACKWARD, COMPUTING_LANE, 1, 4),
    Span(ALL_REDUCE, "gloo thread 1", 2, 3),
    Span(ALL_REDUCE, "gloo thread 2", 3, 6),
    Span(ALL_REDUCE, "gloo thread 1", 5, 7),
    Span(WAITING, COMPUTING_LANE, 4, 7),
    Span(OPTIMIZER, COMPUTING_LANE, 7, 8),
]


def test_what_backward_hides_is_the_time_that_both_share():
    assert hidden_share(STEP) == pytest.approx(2 / 5)  # two messages at the same time count once
    assert hidden_share([span for span in STEP if span.name != ALL_REDUCE]) == 0


def test_a_device_waits_where_no_operator_of_its_threads_runs():
    """Two replicas on threads of their own; the main thread, which is device 0's, has the backward of both."""
    seen = [
        Event(0, 1000, OPTIMIZER, 1),
        Event(1000, 1500, "aten::index", 1),  # the batch is read before the phases, which is not waiting
        Event(2000, 5000, FORWARD, 9),
        Event(2000, 5000, "aten::conv2d", 9),
        Event(2000, 9000, FORWARD, 8),
        Event(2000, 4000, "aten::conv2d", 8),
        Event(4000.5, 9000, "aten::mm", 8),  # Python ran between the two
        Event(9000, 12000, BACKWARD, 1),
        Event(9000, 10000, "aten::mm", 1),
        Event(9500, 11000, "gloo:all_reduce", 3),
        Event(11000, 12000, "aten::mm", 1),
        Event(12000, 14000, OPTIMIZER, 1),
        Event(12000, 14000, "aten::add_", 1),
    ]
    (first,), (second,) = steps_of_devices(sorted(seen), 100_000, ALL_REDUCE)
    assert (first.began, first.duration) == (second.began, second.duration) == (101_000, 13_000)
    shown = [(span.name, round(span.start, 6), round(span.end, 6)) for span in first.spans]
    assert shown == [
        (WAITING, 500, 1000),
        (FORWARD, 1000, 4000),
        (WAITING, 4000, 8000),
        (BACKWARD, 8000, 9000),
        (WAITING, 9000, 10000),
        (BACKWARD, 10000, 11000),
        (OPTIMIZER, 11000, 13000),
        (ALL_REDUCE, 8500, 10000),
    ]
    assert count_backwards(first.spans) == 1
    shown = [(span.name, round(span.start, 6), round(span.end, 6)) for span in second.spans]
    assert shown[:3] == [(WAITING, 0, 1000), (FORWARD, 1000, 8000), (WAITING, 8000, 13000)]


def test_the_step_that_is_shown_has_the_median_time_and_both_ranks_one_clock():
    def steps(first_began: float, *durations: float) -> list[RecordedStep]:
        spans = [Span(FORWARD, COMPUTING_LANE, 0, each) for each in durations]
        return [RecordedStep(first_began + i, span.end, [span]) for i, span in enumerate(spans)]

    # By the slower rank the steps took 900, 500 and 700 milliseconds.
    recorded = zip(steps(10_000, 900, 200, 700), steps(10_250, 100, 500, 600), strict=True)
    shown = typical_steps.spans_of_ranks(typical_steps.typical(list(recorded)))
    assert shown == [[Span(FORWARD, COMPUTING_LANE, 0.0, 700.0)], [Span(FORWARD, COMPUTING_LANE, 250.0, 850.0)]]


def begins_to_send_in_backward(spans: list[Span]) -> bool:
    """True also where the rank computes nothing while it sends, because other programs have the core."""
    first_message = min(span.start for span in spans if span.name == ALL_REDUCE)
    return first_message < max(span.end for span in spans if span.name == BACKWARD)


def check_lanes(lanes: dict[str, list[list[Span]]]) -> None:
    """One message for each parameter or bucket, on both ranks; all but the naive one send during backward."""
    parameters = len(list(deep_net().parameters()))
    for rank in (0, 1):
        of_wrappers = {wrapper: of_ranks[rank] for wrapper, of_ranks in lanes.items()}
        messages = {wrapper: sum(span.name == ALL_REDUCE for span in spans) for wrapper, spans in of_wrappers.items()}
        assert messages[NAIVE] == messages[OVERLAPPED] == parameters
        assert 1 < messages[TORCH] < messages[BUCKETED] < 10
        assert messages[NO_SYNC] == messages[TORCH]
        assert not begins_to_send_in_backward(of_wrappers[NAIVE])
        for wrapper in (OVERLAPPED, BUCKETED, TORCH):
            assert begins_to_send_in_backward(of_wrappers[wrapper]), wrapper
        # no_sync sends nothing before its second backward.
        *_, last_forward = [span for span in of_wrappers[NO_SYNC] if span.name == FORWARD]
        assert all(span.start >= last_forward.end for span in of_wrappers[NO_SYNC] if span.name == ALL_REDUCE)


@pytest.mark.parametrize("link", ["1 Gbit/s", "100 Mbit/s"])
def test_the_recorded_lanes_of_a_narrow_link_show_what_the_pages_say_of_them(link):
    groups = map(read_group, page_tables.recorded("timeline")["groups"])
    (group,) = [group for group in groups if link in group.title]
    check_lanes(timeline_plot.spans_of(group))


@pytest.mark.slow
def test_over_loopback_the_lanes_are_recorded_without_root():
    group = timeline.record_over(timeline.LOOPBACK, ranks(2, on_cpu=True).run, rounds=1)
    check_lanes(group["lanes"])
    assert set(group["rows"]) == set(group["lanes"]) == set(timeline.WRAPPERS)
