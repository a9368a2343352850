"""The three promises of the ladder held against results: same weights, exact evaluation, even memory."""

import math
from dataclasses import dataclass

from benchmarks.harness.rows import FIRST
from common import ladder

FARTHEST = 1e-9  # in float64; what rounding alone does is below 1e-11
LOSSES_APART = 1e-9  # relatively, in float64: one sample in another's place is far above
MOST_SPREAD = 1.05  # of DDP's ranks, fullest over emptiest


@dataclass(frozen=True)
class Verdict:
    """`kept` is None where the results that would tell are missing; `line` says it with its number."""

    kept: bool | None
    line: str


def verdicts(report: dict) -> list[Verdict]:
    return [in_step(report["levels"] | report.get("sharded", {})), exact(report["levels"]), balanced(report["levels"])]


def exit_code(report: dict) -> int:
    """130 if the user stopped it, 1 if a level failed or a promise is broken or could not be checked, else 0."""
    if report["interrupted"]:
        return 130
    all_kept = all(verdict.kept for verdict in verdicts(report))
    return 1 if report["failures"] or not all_kept else 0


def in_step(levels: dict[str, dict]) -> Verdict:
    """The verdict on weights: do all levels end at level 00's?"""
    distances = {level: result.get("max_weight_difference") for level, result in levels.items()}
    apart = []
    for level, far in distances.items():
        if far is not None and not far <= FARTHEST:  # nor is what is not a number
            apart.append(f"{level} with |Δw| = {far:.1e}")
    if apart:
        return Verdict(False, f"OUT OF STEP: {', '.join(apart)}")
    missing = [level for level, far in distances.items() if far is None]
    if missing:
        return Verdict(None, f"IN STEP? no weights of {', '.join(missing)}")
    beside = "".join(f", {ladder.short_name(rung)}" for rung in levels if rung in ladder.SHARDED)
    count = len(set(map(ladder.level_of, levels)))
    return Verdict(True, f"IN STEP: {count} levels{beside}, max |Δw| = {max(distances.values()):.1e}")


def exact(levels: dict[str, dict]) -> Verdict:
    """The verdict on evaluation: each test sample once at every level and number of ranks, as at level 00 on one.

    Sums of losses show a sample that is left out while another one is counted twice. Records of before have none.
    """
    counted = evaluated(levels)
    on_one_process = [count for (level, _), count in counted.items() if level not in ladder.DISTRIBUTED]
    reference = on_one_process[0] if on_one_process else None
    wrong = []
    for (level, ranks), count in counted.items():
        if reference is not None and count != reference:
            wrong.append(f"{level} counts {count} of {reference} samples on {ranks}")
    sums = {level: result["eval_loss_sum"] for level, result in levels.items() if "eval_loss_sum" in result}
    expected = sums.get(FIRST)
    for level, total in sums.items():
        if expected is not None and not math.isclose(total, expected, rel_tol=LOSSES_APART):
            wrong.append(f"{level} adds up losses to {total:.6f}, not {expected:.6f}")
    if wrong:
        return Verdict(False, f"INEXACT: {', '.join(wrong)}")
    missing = [level for level, result in levels.items() if is_unchecked(level, result, sums)]
    if missing:
        return Verdict(None, f"EXACT? no evaluation of {', '.join(missing)}")
    world_sizes = sorted({ranks for _, ranks in counted})
    return Verdict(True, f"EXACT: {reference} of {reference} samples on {', '.join(map(str, world_sizes))} ranks")


def evaluated(levels: dict[str, dict]) -> dict[tuple[str, int], int]:
    """The samples that were evaluated, by level and number of ranks."""
    counted = {}
    for level, result in levels.items():
        if "run" in result:
            ranks = result["run"]["world_size"] if level in ladder.DISTRIBUTED else 1
            counted[level, ranks] = result["run"]["evaluated"]
        for ranks, count in result.get("evaluated_on", {}).items():
            counted[level, int(ranks)] = count
    return counted


def is_unchecked(level: str, result: dict, sums: dict[str, float]) -> bool:
    """Is there something of a level that `exact` cannot compare?"""
    if "run" not in result:
        return True
    lacks_sum = bool(sums) and level not in sums
    if level in ladder.DISTRIBUTED:
        return "evaluated_on" not in result or lacks_sum
    return level == FIRST and lacks_sum


def balanced(levels: dict[str, dict]) -> Verdict:
    """The verdict on memory: do DDP's ranks hold the same? Nothing is promised of DataParallel's devices."""
    sizes = peaks(levels)
    missing = [level for level in ("01_data_parallel", *ladder.DISTRIBUTED) if not sizes[level]]
    if missing:
        return Verdict(None, f"BALANCED? no memory of {', '.join(missing)}")
    of_ddp = {level: spread(sizes[level]) for level in ladder.DISTRIBUTED}
    of_data_parallel = spread(sizes["01_data_parallel"])
    line = f"fullest device over emptiest: DDP {max(of_ddp.values()):.2f}, DataParallel {of_data_parallel:.2f}"
    uneven = [level for level, fullest in of_ddp.items() if fullest > MOST_SPREAD]
    if uneven:
        return Verdict(False, f"UNBALANCED: {line} (at {', '.join(uneven)})")
    return Verdict(True, f"BALANCED: {line}")


def peaks(levels: dict[str, dict]) -> dict[str, list[int]]:
    """Of each level the peak bytes of each device; an empty list where they are not known. See `are_measured`."""
    if are_measured(levels):
        return {level: result["run"]["peak_memory_bytes"] for level, result in levels.items()}
    sizes = {}
    for level, result in levels.items():
        sizes[level] = [sum(split.values()) for split in result.get("simulated_peak_memory", [])]
    return sizes


def are_measured(levels: dict[str, dict]) -> bool:
    """Did the allocator keep a peak for each device of every level? Replicas on one GPU have none of their own.

    If one is missing, the accounting's peaks count for all levels, so that they can be compared.
    """
    for result in levels.values():
        run = result.get("run", {})
        devices = max(run.get("world_size", 1), len(result.get("simulated_peak_memory", [])))
        if len(run.get("peak_memory_bytes") or []) < devices:
            return False
    return True


def spread(sizes: list[int]) -> float:
    """The fullest device over the emptiest one: 1 is balance, infinity a device that held nothing."""
    emptiest = min(sizes)
    if emptiest == 0:
        return math.inf
    return max(sizes) / emptiest
