"""Rows whose steps are recorded as lanes: how long their steps take, and what happens in a typical one."""

import statistics
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain

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
    contestants = {row: partial(record_steps, row, STEPS_PER_ROUND) for row in rows}
    samples = {}
    lanes = {}
    for row, rounds_of_ranks in take_turns(contestants, range(rounds)).items():
        rounds_of_steps: list[list[Step]] = [list(zip(*of_ranks, strict=True)) for of_ranks in rounds_of_ranks]
        samples[row] = [statistics.fmean(map(duration, steps)) for steps in rounds_of_steps]
        lanes[row] = spans_of_ranks(typical(list(chain.from_iterable(rounds_of_steps))))
    return records.group(title, "ms", samples) | {"lanes": lanes}


def duration(step: Step) -> float:
    """The duration of a step on its slowest rank."""
    return max(rank_step.duration for rank_step in step)


def typical(steps: list[Step]) -> Step:
    """The step whose duration is nearest to the median."""
    median = statistics.median(map(duration, steps))
    return min(steps, key=lambda step: abs(duration(step) - median))


def spans_of_ranks(step: Step) -> list[list[Span]]:
    """The spans of each rank, since the first of the ranks began the step."""
    first = min(rank_step.began for rank_step in step)
    of_ranks = []
    for rank_step in step:
        delay = rank_step.began - first
        spans = []
        for span in rank_step.spans:
            spans.append(span._replace(start=round(delay + span.start, 3), end=round(delay + span.end, 3)))
        of_ranks.append(spans)
    return of_ranks
