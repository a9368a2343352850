"""Rows whose steps are recorded as lanes: how long their steps take, and what happens in a typical one."""

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
    """The group of all rows, which take turns: milliseconds a step, and as "lanes" each rank's spans of a typical step.

    Args:
        record_steps: records so many steps of a row, and returns for each rank a list of them.
    """
    count = QUICK_STEPS_PER_ROUND if options.quick else STEPS_PER_ROUND

    def record_round(row: str) -> list[Step]:
        return list(zip(*record_steps(row, count), strict=True))

    rounds_of_rows = take_turns({row: partial(record_round, row) for row in rows}, range(options.rounds))
    samples: dict[str, list[float]] = {}
    spans_of_rows = {}
    for row, rounds in rounds_of_rows.items():
        samples[row] = []
        all_steps: list[Step] = []
        for steps in rounds:
            samples[row].append(1000 * statistics.fmean(map(seconds_of, steps)))
            all_steps += steps
        spans_of_rows[row] = spans_of_ranks(typical(all_steps))
    return records.group(title, "ms", samples) | {"lanes": spans_of_rows}


def seconds_of(step: Step) -> float:
    """The time of the slowest rank."""
    return max(rank_step.seconds for rank_step in step)


def typical(steps: list[Step]) -> Step:
    """The step whose time is nearest to the median."""
    median = statistics.median(map(seconds_of, steps))
    return min(steps, key=lambda step: abs(seconds_of(step) - median))


def spans_of_ranks(step: Step) -> list[list[Span]]:
    """The spans of each rank, in milliseconds since the first of them began the step."""
    first = min(rank_step.began for rank_step in step)
    of_ranks = []
    for rank_step in step:
        later = rank_step.began - first
        spans = []
        for name, lane, start, end in rank_step.spans:
            spans.append(Span(name, lane, round(1000 * (later + start), 3), round(1000 * (later + end), 3)))
        of_ranks.append(spans)
    return of_ranks
