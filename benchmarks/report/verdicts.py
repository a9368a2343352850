"""The three promises of the ladder held against results: same weights, exact evaluation, even memory."""

import math
from dataclasses import dataclass

from benchmarks.harness.rows import BASELINE, REPLICATED
from benchmarks.report.cells import peaks
from common import ladder
from common.data.synthetic import SIZES

MOST_WEIGHT_DIFFERENCE = 1e-9  # In float64 rounding alone stays below 1e-11.
MOST_LOSS_DIFFERENCE = 1e-9  # It is relative. One sample in another's place makes far more.
MOST_IMBALANCE = 1.05


@dataclass(frozen=True)
class Verdict:
    """A promise that is kept or not; `line` says it with its number."""

    kept: bool
    line: str


def verdicts(report: dict) -> list[Verdict]:
    levels = report["levels"]
    return [in_step(levels, report["sharded"]), exact(levels, SIZES["t10k"]), balanced(levels)]


def in_step(levels: dict[str, dict], sharded: dict[str, dict]) -> Verdict:
    """The verdict on weights: do all levels, and level 02's sharded scripts, end at level 00's?"""
    largest = 0.0
    different = []
    for name, result in (levels | sharded).items():
        difference = result["max_weight_difference"]
        largest = max(largest, difference)
        if not difference <= MOST_WEIGHT_DIFFERENCE:  # true of NaN too
            different.append(f"{name} with |Δw| = {difference:.1e}")
    if different:
        return Verdict(False, f"OUT OF STEP: {', '.join(different)}")
    compared = [f"{len(levels)} levels", *map(ladder.short_name, sharded)]
    return Verdict(True, f"IN STEP: {', '.join(compared)}, max |Δw| = {largest:.1e}")


def exact(levels: dict[str, dict], samples: int) -> Verdict:
    """The verdict on evaluation: did every level count all test `samples`, whatever the number of ranks?

    Sums of losses show a sample that is left out while another one is counted twice. Level 01 has no such sum.
    """
    wrong = []
    world_sizes = set()
    for level, result in levels.items():
        ranks = result["run"]["world_size"] if level in ladder.DISTRIBUTED else 1
        # The run and the second evaluation may have equally many ranks.
        counts = [(str(ranks), result["run"]["evaluated"]), *result.get("evaluated_on", {}).items()]
        for number, count in counts:
            world_sizes.add(int(number))
            if count != samples:
                wrong.append(f"{level} counts {count} of {samples} samples on {number}")
    expected = levels[BASELINE]["eval_loss_sum"]
    for level in ladder.DISTRIBUTED:
        total = levels[level]["eval_loss_sum"]
        if not math.isclose(total, expected, rel_tol=MOST_LOSS_DIFFERENCE):
            wrong.append(f"{level} adds up losses to {total:.6f}, not {expected:.6f}")
    if wrong:
        return Verdict(False, f"INEXACT: {', '.join(wrong)}")
    rank_counts = ", ".join(map(str, sorted(world_sizes)))
    return Verdict(True, f"EXACT: {samples} of {samples} samples on {rank_counts} ranks")


def balanced(levels: dict[str, dict]) -> Verdict:
    """The verdict on memory: do DDP's ranks hold the same? Nothing is promised of DataParallel's devices."""
    sizes = peaks(levels)
    ddp_ratios = {level: imbalance(sizes[level]) for level in ladder.DISTRIBUTED}
    data_parallel_ratio = imbalance(sizes[REPLICATED])
    line = f"fullest device over emptiest: DDP {max(ddp_ratios.values()):.2f}, DataParallel {data_parallel_ratio:.2f}"
    uneven = [level for level, ratio in ddp_ratios.items() if ratio > MOST_IMBALANCE]
    if uneven:
        return Verdict(False, f"UNBALANCED: {line} (at {', '.join(uneven)})")
    return Verdict(True, f"BALANCED: {line}")


def imbalance(sizes: list[float]) -> float:
    """The fullest device over the emptiest one: 1 is balance."""
    return max(sizes) / min(sizes)
