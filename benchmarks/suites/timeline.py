"""What every thread does during one step of two ranks that average their gradients.

Two ranks, one core each, train a small network over a link of 1 Gbit/s and of 100 Mbit/s between two network namespaces
(root and iproute2), and over loopback, which needs neither. Beside the steps' times a group holds the "lanes" of one
typical step, from which `benchmarks.report` draws pictures.
"""

import statistics
from collections.abc import Callable
from functools import partial

from benchmarks.harness import records
from benchmarks.harness.gradient_averaging import BATCH, WAYS
from benchmarks.harness.groups import CannotMeasure, Extent, Group
from benchmarks.harness.lanes import RecordedStep, record_rank
from benchmarks.harness.paired import order
from benchmarks.harness.spans import ALL_REDUCE, Span, hidden_share
from benchmarks.harness.two_nodes import why_not
from benchmarks.suites.network import Network, network
from common.processes import ranks

LINKS = ("1 Gbit/s", "100 Mbit/s")
LOOPBACK = "loopback"
TIMEOUT = 300  # seconds, for any one recording

# Of each rank, the steps that were recorded of one way.
Recording = list[list[RecordedStep]]
Recorder = Callable[[str, int], Recording]


def groups() -> list[Group]:
    """A group for each link; whether there can be two nodes here shows when it is measured."""
    return [Group(link, title(link), tuple(WAYS), partial(measured, link)) for link in (*LINKS, LOOPBACK)]


def title(link: str) -> str:
    return f"one step of two ranks over {link}, {BATCH} images a backward"


def measured(link: str, rows: tuple[str, ...], extent: Extent) -> dict:
    """The record of these ways over one link: milliseconds a step, and the lanes of a typical one."""
    if link == LOOPBACK:
        return _group(link, record_ways(over_loopback, extent, rows), extent)
    reason = why_not()
    if reason:
        raise CannotMeasure(f"no two nodes: {reason}")
    with network() as net:
        net.limit(link)
        return _group(link, record_ways(over_the_cable(net), extent, rows), extent)


def _steps_of_a_round(extent: Extent) -> int:
    return 1 if extent.quick else 2


def over_loopback(way: str, steps: int) -> Recording:
    """Both ranks' steps, on this machine."""
    return ranks(2, on_cpu=True).run(record_rank, way, steps, timeout=TIMEOUT)


def over_the_cable(net: Network) -> Recorder:
    """Both ranks' steps, on two nodes whose cable is limited already."""

    def record(way: str, steps: int) -> Recording:
        return [_steps(answer) for answer in net.ask("record_rank", way=way, steps=steps)]

    return record


def _steps(answer: list) -> list[RecordedStep]:
    """A rank's steps, from the lists that JSON has made of them."""
    steps = []
    for began, seconds, spans in answer:
        steps.append(RecordedStep(began, seconds, [Span(*span) for span in spans]))
    return steps


def record_ways(record: Recorder, extent: Extent, ways: tuple[str, ...]) -> dict[str, Recording]:
    """The steps of each way, which take turns round by round, in an order that is drawn for each round."""
    recordings: dict[str, Recording] = {way: [[], []] for way in ways}
    for turn in range(extent.rounds):
        for way in order(list(ways), turn):
            for rank, steps in enumerate(record(way, _steps_of_a_round(extent))):
                recordings[way][rank] += steps
    return recordings


def _group(link: str, recordings: dict[str, Recording], extent: Extent) -> dict:
    steps = _steps_of_a_round(extent)
    samples = {way: _milliseconds_by_round(recording, steps) for way, recording in recordings.items()}
    group = records.group(title(link), "ms", samples)
    group["link"] = link
    group["lanes"] = {way: typical_step(recording) for way, recording in recordings.items()}
    group["notes"] = notes(group["lanes"])
    return group


def notes(lanes: dict[str, list[list[Span]]]) -> list[str]:
    """Of each way with all-reduces: how many a step has, and what backward hides of their time, rank by rank.

    A line is '  naive: 52 all-reduces; backward hides 0% (rank 0), 3% (rank 1) of their time'.
    """
    lines = []
    for way, of_ranks in lanes.items():
        messages = sum(span.name == ALL_REDUCE for span in of_ranks[0])
        if messages:
            shares = ", ".join(f"{hidden_share(spans):.0%} (rank {rank})" for rank, spans in enumerate(of_ranks))
            lines.append(f"  {way}: {messages} all-reduces; backward hides {shares} of their time")
    return lines


def _milliseconds_by_round(recording: Recording, steps_of_a_round: int) -> list[float]:
    """Of each round the mean of its steps: they follow one another, so that they are one sample and not several."""
    seconds = _step_seconds(recording)
    rounds = []
    for first in range(0, len(seconds), steps_of_a_round):
        rounds.append(1000 * statistics.fmean(seconds[first : first + steps_of_a_round]))
    return rounds


def _step_seconds(recording: Recording) -> list[float]:
    """Of each step the time of the slowest rank."""
    slowest = []
    for steps in zip(*recording, strict=True):
        slowest.append(max(step.seconds for step in steps))
    return slowest


def typical_step(recording: Recording) -> list[list[Span]]:
    """Of each rank the spans of the step whose time is nearest to the median, in milliseconds from the first begin."""
    seconds = _step_seconds(recording)
    median = statistics.median(seconds)
    typical = min(range(len(seconds)), key=lambda index: abs(seconds[index] - median))
    steps = [of_rank[typical] for of_rank in recording]
    first = min(step.began for step in steps)
    return [[_in_milliseconds(span, step.began - first) for span in step.spans] for step in steps]


def _in_milliseconds(span: Span, shift: float) -> Span:
    start = round(1000 * (span.start + shift), 3)
    end = round(1000 * (span.end + shift), 3)
    return Span(span.name, span.lane, start, end)


if __name__ == "__main__":
    raise SystemExit("error: a suite is run by: pytest benchmarks -k test_timeline")
