"""Rows whose steps are recorded as lanes: how long their steps take, and what happens in a typical one."""

import statistics
from collections.abc import Callable, Iterable
from functools import partial

from benchmarks.harness import records
from benchmarks.harness.lanes.spans import RecordedStep, Span
from benchmarks.harness.paired import take_turns

STEPS_PER_ROUND = 2

# One step, as each rank or device recorded it.
Step = tuple[RecordedStep, ...]


def record_in_turns(
    title: str, rows: Iterable[str], record_steps: Callable[[str, int], list[list[RecordedStep]]], rounds: int
) -> dict:
    """The group of all rows, which take turns: milliseconds a step, and as "lanes" each rank's spans of a typical step.

    Args:
        record_steps: records a given number of steps of a row, and returns for each rank a list of them.
    """
    recordings = take_turns({row: partial(record_steps, row, STEPS_PER_ROUND) for row in rows}, range(rounds))
    samples: dict[str, list[float]] = {}
    lanes = {}
    for row, recorded_rounds in recordings.items():
        samples[row] = []
        all_steps: list[Step] = []
        for steps_of_ranks in recorded_rounds:
            steps = list(zip(*steps_of_ranks, strict=True))
            samples[row].append(1000 * statistics.fmean(map(seconds_of, steps)))
            all_steps += steps
        lanes[row] = spans_of_ranks(typical(all_steps))
    return records.group(title, "ms", samples) | {"lanes": lanes}


def seconds_of(step: Step) -> float:
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
        delay = rank_step.began - first
        spans = []
        for name, lane, start, end in rank_step.spans:
            spans.append(Span(name, lane, round(1000 * (delay + start), 3), round(1000 * (delay + end), 3)))
        of_ranks.append(spans)
    return of_ranks
