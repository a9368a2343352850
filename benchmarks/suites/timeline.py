"""What every thread does during one step of two ranks that average their gradients.

Two ranks, one core each, train a small network over a link of 1 Gbit/s and of 100 Mbit/s between two network namespaces
(root and iproute2), and over loopback, which needs neither. Beside the steps' times a group holds the "lanes" of one
typical step, from which `benchmarks.report` draws pictures.
"""

import statistics
from collections.abc import Callable
from functools import partial
from itertools import chain

from benchmarks.harness import records
from benchmarks.harness.gradient_averaging import BATCH, WAYS
from benchmarks.harness.groups import Group, MeasureOptions
from benchmarks.harness.lanes import record_rank
from benchmarks.harness.paired import measure
from benchmarks.harness.spans import RecordedStep, Span, to_spans
from benchmarks.suites.network import WaitingRanks, waiting_ranks
from common.processes import ranks

LINKS = ("1 Gbit/s", "100 Mbit/s")
LOOPBACK = "loopback"
TIMEOUT = 300  # seconds, for any one recording

# Of each rank, the steps that were recorded of one way.
Recording = list[list[RecordedStep]]


def groups() -> list[Group]:
    """A group for each link; whether there can be two nodes here shows when it is measured."""
    found = []
    for link in (*LINKS, LOOPBACK):
        found.append(Group(f"timeline-{link}", title(link), tuple(WAYS), partial(measure_group, link)))
    return found


def title(link: str) -> str:
    return f"one step of two ranks over {link}, {BATCH} images a backward"


def measure_group(link: str, options: MeasureOptions) -> dict:
    """The record of all ways over one link: milliseconds a step, and the lanes of a typical one."""
    if link == LOOPBACK:
        return record(title(link), tuple(WAYS), over_loopback, options) | {"link": link}
    with waiting_ranks() as pair:
        pair.limit(link)
        return record(title(link), tuple(WAYS), partial(over_the_cable, pair), options) | {"link": link}


def over_loopback(way: str, steps: int) -> Recording:
    """Both ranks' steps, on this machine."""
    return ranks(2, on_cpu=True).run(record_rank, way, steps, timeout=TIMEOUT)


def over_the_cable(pair: WaitingRanks, way: str, steps: int) -> Recording:
    """Both ranks' steps, on two nodes whose cable is limited already; JSON has made lists of them."""
    recording = []
    for answer in pair.ask("record_rank", way=way, steps=steps):
        recording.append([RecordedStep(began, seconds, to_spans(spans)) for began, seconds, spans in answer])
    return recording


def record(name: str, ways: tuple[str, ...], run: Callable[[str, int], Recording], options: MeasureOptions) -> dict:
    """The group of all ways, which take turns. A sample is the mean of a round's steps, by the slower rank."""
    steps = 1 if options.quick else 2  # of a round
    recordings: dict[str, list[Recording]] = {way: [] for way in ways}

    def sample(way: str) -> float:
        recording = run(way, steps)
        recordings[way].append(recording)
        return 1000 * statistics.fmean(_step_seconds(recording))

    samples = measure({way: partial(sample, way) for way in ways}, range(options.rounds))
    lanes = {}
    for way, runs in recordings.items():
        steps_by_rank = []
        for rank_steps in zip(*runs, strict=True):
            steps_by_rank.append(list(chain.from_iterable(rank_steps)))
        lanes[way] = typical_step(steps_by_rank)
    return records.group(name, "ms", samples) | {"lanes": lanes}


def _step_seconds(recording: Recording) -> list[float]:
    """Of each step the time of the slowest rank."""
    slowest = []
    for steps in zip(*recording, strict=True):
        slowest.append(max(step.seconds for step in steps))
    return slowest


def typical_step(recording: Recording) -> list[list[Span]]:
    """Of each rank the spans of the step whose time is nearest to the median, in milliseconds from the first begin."""
    seconds = _step_seconds(recording)
    distances = [abs(each - statistics.median(seconds)) for each in seconds]
    typical = distances.index(min(distances))
    steps = [rank_steps[typical] for rank_steps in recording]
    first = min(step.began for step in steps)
    lanes = []
    for step in steps:
        shift = step.began - first
        lanes.append([_in_milliseconds(span, shift) for span in step.spans])
    return lanes


def _in_milliseconds(span: Span, shift: float) -> Span:
    start = round(1000 * (span.start + shift), 3)
    end = round(1000 * (span.end + shift), 3)
    return Span(span.name, span.lane, start, end)
