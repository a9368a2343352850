"""The three promises of the ladder held against results: same weights, exact evaluation, even memory."""

import math
from dataclasses import dataclass

from common import ladder

FARTHEST = 1e-9  # in float64; what rounding alone does is below 1e-11
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
    """The verdict on evaluation: each test sample once at every level and number of ranks, as at level 00 on one."""
    counted: dict[tuple[str, int], int] = {}  # by level and number of ranks
    missing = []
    for level, result in levels.items():
        is_distributed = level in ladder.DISTRIBUTED
        if "run" in result:
            ranks = result["run"]["world_size"] if is_distributed else 1
            counted[level, ranks] = result["run"]["evaluated"]
        for ranks, count in result.get("evaluated_on", {}).items():
            counted[level, int(ranks)] = count
        if "run" not in result or (is_distributed and "evaluated_on" not in result):
            missing.append(level)
    on_one_process = [count for (level, _), count in counted.items() if level not in ladder.DISTRIBUTED]
    if not on_one_process:
        return Verdict(None, f"EXACT? no evaluation of {', '.join(missing)}")
    reference = on_one_process[0]
    wrong = []
    for (level, ranks), count in counted.items():
        if count != reference:
            wrong.append(f"{level} counts {count} of {reference} samples on {ranks}")
    if wrong:
        return Verdict(False, f"INEXACT: {', '.join(wrong)}")
    if missing:
        return Verdict(None, f"EXACT? no evaluation of {', '.join(missing)}")
    world_sizes = sorted({ranks for _, ranks in counted})
    return Verdict(True, f"EXACT: {reference} of {reference} samples on {', '.join(map(str, world_sizes))} ranks")


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
