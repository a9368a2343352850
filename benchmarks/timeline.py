"""What every thread does during one step: DataParallel's replicas, and two ranks that average their gradients.

    python -m benchmarks.timeline

Two ranks, one core each, train a small network over a link of 1 Gbit/s and of 100 Mbit/s between two network namespaces
(root and iproute2), and over loopback, which needs neither. It writes into results/

    timeline.json           every recorded span, and the steps' times
    timeline-….png          the lanes of each link
    timeline-….trace.json   the same for https://ui.perfetto.dev

The pictures and traces are drawn again from the JSON file alone: python -m benchmarks.report.timeline_plot PATH.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import records
from benchmarks.harness.gradient_averaging import BATCH, BUCKETED, NAIVE, NO_SYNC, OVERLAPPED, TORCH
from benchmarks.harness.lanes import RecordedStep, record_rank, record_replicas
from benchmarks.harness.paired import order
from benchmarks.harness.spans import ALL_REDUCE, Span, hidden_share
from benchmarks.harness.two_nodes import why_not
from benchmarks.report import timeline_plot
from benchmarks.suites.network import Network, network
from common.processes import ranks

WAYS = (NAIVE, OVERLAPPED, BUCKETED, TORCH, NO_SYNC)
LINKS = ("1 Gbit/s", "100 Mbit/s")
LOOPBACK = "loopback"
REPLICAS = 2
TIMEOUT = 300  # seconds, for any one recording

# Of each rank, the steps that were recorded of one way.
Recording = list[list[RecordedStep]]
Recorder = Callable[[str, int], Recording]


class Extent(NamedTuple):
    """How much is recorded: in each round, some steps of every way."""

    rounds: int
    steps: int


FULL = Extent(rounds=10, steps=2)
QUICK = Extent(rounds=1, steps=1)


def over_loopback(way: str, steps: int) -> Recording:
    """Both ranks' steps, on this machine."""
    return ranks(2).run(record_rank, way, steps, timeout=TIMEOUT)


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


def record_link(link: str, record: Recorder, extent: Extent) -> dict:
    """The group of `benchmarks.harness.records` for one link: milliseconds a step, and the lanes of a typical one."""
    title = f"one step of two ranks over {link}, {BATCH} images a backward"
    return _group(title, link, record_ways(record, extent, WAYS), extent.steps)


def record_ways(record: Recorder, extent: Extent, ways: tuple[str, ...]) -> dict[str, Recording]:
    """The steps of each way, which take turns round by round, in an order that is drawn for each round."""
    recordings: dict[str, Recording] = {way: [[], []] for way in ways}
    for turn in range(extent.rounds):
        for way in order(list(ways), turn):
            for rank, steps in enumerate(record(way, extent.steps)):
                recordings[way][rank] += steps
    return recordings


def record_data_parallel(extent: Extent) -> dict:
    """The group of DataParallel's emulation, in one process with all cores."""
    way = f"DataParallel, {REPLICAS} replicas"
    recording: Recording = [[]]
    for _ in range(extent.rounds):
        recording[0] += ranks(1).run(record_replicas, REPLICAS, extent.steps, timeout=TIMEOUT)[0]
    title = f"one step of DataParallel's emulation, {BATCH} images a replica"
    return _group(title, "threads", {way: recording}, extent.steps)


def _group(title: str, link: str, recordings: dict[str, Recording], steps_of_a_round: int) -> dict:
    samples = {way: _milliseconds_by_round(recording, steps_of_a_round) for way, recording in recordings.items()}
    group = records.group(title, "ms", samples)
    group["link"] = link
    group["lanes"] = {way: typical_step(recording) for way, recording in recordings.items()}
    group["notes"] = notes(group["lanes"])
    return group


def notes(lanes: dict[str, list[list[Span]]]) -> list[str]:
    """Of each way with all-reduces: how many a step has, and what backward hides of their time, rank by rank."""
    lines = []
    for way, of_ranks in lanes.items():
        messages = sum(span.name == ALL_REDUCE for span in of_ranks[0])
        if messages:
            shares = " and ".join(f"{hidden_share(spans):.0%}" for spans in of_ranks)
            lines.append(f"  {way:<24}{messages:>4} all-reduces, {shares:>13} within backward")
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


def record_all(links: list[str], extent: Extent) -> list[dict]:
    """A group for DataParallel, and one for each link. Those that are not loopback need `why_not()` to be None."""
    groups = [record_data_parallel(extent)]
    narrow = [link for link in links if link != LOOPBACK]
    if narrow:
        with network() as net:
            for link in narrow:
                net.limit(link)
                groups.append(record_link(link, over_the_cable(net), extent))
    if LOOPBACK in links:
        groups.append(record_link(LOOPBACK, over_loopback, extent))
    return groups


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.timeline", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="PATH", default=Path("results"), help="folder (default: results)")
    parser.add_argument("--loopback", action="store_true", help="over loopback only, which needs no root")
    parser.add_argument("--quick", action="store_true", help="a single step of each")
    options = parser.parse_args(argv)
    links = [*LINKS, LOOPBACK]
    reason = None if options.loopback else why_not()
    if options.loopback or reason:
        links = [LOOPBACK]
    if reason:
        print(f"over loopback only: {reason}", file=sys.stderr)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler reports its begin and its end
    began = records.circumstances()
    groups = record_all(links, QUICK if options.quick else FULL)
    path = options.out / "timeline.json"
    options.out.mkdir(parents=True, exist_ok=True)
    records.write(path, "timeline", began, groups=groups)
    for group in groups:
        print(records.table(group))
    timeline_plot.main([str(path)])


if __name__ == "__main__":
    main()
