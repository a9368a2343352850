"""Rows whose steps are recorded thread by thread: how long their steps take, and what happens in a typical one."""

import statistics
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.harness import records
from benchmarks.harness.groups import MeasureOptions
from benchmarks.harness.paired import measure
from benchmarks.harness.spans import RecordedStep, Span

STEPS = 2  # of a row in each round
QUICK_STEPS = 1

# The steps of one run of a row, of each of its ranks or devices.
Recording = list[list[RecordedStep]]
# One step, of each rank or device.
Step = tuple[RecordedStep, ...]


def measure_group(
    title: str, rows: Sequence[str], record_steps: Callable[[str, int], Recording], options: MeasureOptions
) -> dict:
    """The group of all rows, which take turns: milliseconds a step, and the "lanes" of a typical step of each rank.

    Args:
        record_steps: records so many steps of a row.
    """
    count = QUICK_STEPS if options.quick else STEPS
    steps: dict[str, list[Step]] = {row: [] for row in rows}

    def milliseconds(row: str) -> float:
        of_round = list(zip(*record_steps(row, count), strict=True))
        steps[row] += of_round
        return 1000 * statistics.fmean(map(_seconds, of_round))

    samples = measure({row: partial(milliseconds, row) for row in rows}, range(options.rounds))
    return records.group(title, "ms", samples) | {"lanes": {row: lanes_of(typical(steps[row])) for row in rows}}


def _seconds(step: Step) -> float:
    """The time of the slowest rank."""
    return max(of_rank.seconds for of_rank in step)


def typical(steps: list[Step]) -> Step:
    """The step whose time is nearest to the median."""
    median = statistics.median(map(_seconds, steps))
    return min(steps, key=lambda step: abs(_seconds(step) - median))


def lanes_of(step: Step) -> list[list[Span]]:
    """The spans of each rank, in milliseconds since the first of them began the step."""
    first = min(of_rank.began for of_rank in step)
    lanes = []
    for of_rank in step:
        shift = of_rank.began - first
        lanes.append([_in_milliseconds(span, shift) for span in of_rank.spans])
    return lanes


def _in_milliseconds(span: Span, shift: float) -> Span:
    start = round(1000 * (span.start + shift), 3)
    end = round(1000 * (span.end + shift), 3)
    return Span(span.name, span.lane, start, end)
