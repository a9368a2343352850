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

# Of each rank, or device, the steps that were recorded of one row.
Recording = list[list[RecordedStep]]


def measure_group(
    title: str, rows: Sequence[str], record_steps: Callable[[str, int], Recording], options: MeasureOptions
) -> dict:
    """The group of all rows, which take turns: milliseconds a step, and the "lanes" of a typical step of each rank.

    Args:
        record_steps: records so many steps of a row.
    """
    steps = QUICK_STEPS if options.quick else STEPS
    recordings: dict[str, Recording] = {row: [] for row in rows}

    def sample(row: str) -> float:
        recording = record_steps(row, steps)
        recordings[row] = _joined(recordings[row], recording)
        return 1000 * statistics.fmean(_seconds(recording))

    samples = measure({row: partial(sample, row) for row in rows}, range(options.rounds))
    lanes = {row: typical_step(recording) for row, recording in recordings.items()}
    return records.group(title, "ms", samples) | {"lanes": lanes}


def _joined(before: Recording, recording: Recording) -> Recording:
    """The steps of two recordings, rank by rank."""
    if not before:
        return recording
    return [steps + more for steps, more in zip(before, recording, strict=True)]


def _seconds(recording: Recording) -> list[float]:
    """Of each step the time of the slowest rank."""
    slowest = []
    for steps in zip(*recording, strict=True):
        slowest.append(max(step.seconds for step in steps))
    return slowest


def typical_step(recording: Recording) -> list[list[Span]]:
    """Of each rank the spans of the step whose time is nearest to the median, in milliseconds from the first begin."""
    seconds = _seconds(recording)
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
