"""Rows whose steps are recorded thread by thread: how long their steps take, and what happens in a typical one."""

import statistics
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.harness import records
from benchmarks.harness.lanes.spans import RecordedStep, Span
from benchmarks.harness.options import MeasureOptions
from benchmarks.harness.paired import take_turns

STEPS_PER_ROUND = 2
QUICK_STEPS_PER_ROUND = 1

# One step, as each rank or device recorded it.
Step = tuple[RecordedStep, ...]


def record_in_turns(
    title: str,
    rows: Sequence[str],
    record_steps: Callable[[str, int], list[list[RecordedStep]]],
    options: MeasureOptions,
) -> dict:
    """The group of all rows, which take turns: milliseconds a step, and the "lanes" of a typical step of each rank.

    Args:
        record_steps: records so many steps of a row, and returns for each rank a list of them.
    """
    count = QUICK_STEPS_PER_ROUND if options.quick else STEPS_PER_ROUND
    recorded = take_turns({row: partial(record_steps, row, count) for row in rows}, range(options.rounds))
    samples = {}
    lanes = {}
    for row, rounds in recorded.items():
        samples[row] = []
        all_steps: list[Step] = []
        for by_rank in rounds:
            round_steps: list[Step] = list(zip(*by_rank, strict=True))  # each has the record of every rank
            seconds = statistics.fmean(seconds_of(step) for step in round_steps)
            samples[row].append(1000 * seconds)
            all_steps += round_steps
        lanes[row] = lanes_of(typical(all_steps))
    return records.group(title, "ms", samples) | {"lanes": lanes}


def seconds_of(step: Step) -> float:
    """The time of the slowest rank."""
    return max(rank_step.seconds for rank_step in step)


def typical(steps: list[Step]) -> Step:
    """The step whose time is nearest to the median."""
    median = statistics.median(map(seconds_of, steps))
    return min(steps, key=lambda step: abs(seconds_of(step) - median))


def lanes_of(step: Step) -> list[list[Span]]:
    """The spans of each rank, in milliseconds since the first of them began the step."""
    first = min(rank_step.began for rank_step in step)
    lanes = []
    for rank_step in step:
        shift = rank_step.began - first
        lanes.append([_in_milliseconds(span, shift) for span in rank_step.spans])
    return lanes


def _in_milliseconds(span: Span, shift: float) -> Span:
    start = round(1000 * (span.start + shift), 3)
    end = round(1000 * (span.end + shift), 3)
    return Span(span.name, span.lane, start, end)
