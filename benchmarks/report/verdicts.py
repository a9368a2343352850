"""The three promises of the ladder held against results: same weights, exact evaluation, even memory."""

import math
from dataclasses import dataclass

from common import ladder

FARTHEST = 1e-9  # in float64; what rounding alone does is below 1e-11
MOST_SPREAD = 1.05  # of DDP's ranks, fullest over emptiest
ON_DEVICES = ("01_data_parallel", *ladder.DISTRIBUTED)  # the levels whose memory is spread over several
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven")


@dataclass(frozen=True)
class Verdict:
    """`kept` is None where the results that would tell are missing; `line` says it with its number."""

    kept: bool | None
    line: str


def verdicts(report: dict) -> list[Verdict]:
    return [in_step(report["levels"]), exact(report["levels"]), balanced(report["levels"])]


def in_step(levels: dict[str, dict]) -> Verdict:
    """The verdict on weights: do all levels end at level 00's?"""
    distance = {level: result.get("max_weight_difference") for level, result in levels.items()}
    apart = {level: far for level, far in distance.items() if far is not None and not far <= FARTHEST}
    if apart:
        return Verdict(
            False, "OUT OF STEP: " + listed(f"{level} with |Δw| = {far:.1e}" for level, far in apart.items())
        )
    missing = [level for level, far in distance.items() if far is None]
    if missing:
        return Verdict(None, f"IN STEP? no weights of {listed(missing)}")
    return Verdict(True, f"IN STEP: {NUMBERS[len(levels)]} levels, max |Δw| = {max(distance.values()):.1e}")


def exact(levels: dict[str, dict]) -> Verdict:
    """The verdict on evaluation: each test sample once at every level and number of ranks, as at level 00 on one."""
    counted: dict[tuple[str, int], int] = {}  # by level and number of ranks
    missing = []
    for level, result in levels.items():
        of_level = _evaluated(level, result)
        for ranks, count in of_level.items():
            counted[level, ranks] = count
        if "run" not in result or (level in ladder.DISTRIBUTED and "evaluated_on" not in result):
            missing.append(level)
    on_one_process = [count for (level, _), count in counted.items() if level not in ladder.DISTRIBUTED]
    if on_one_process:
        reference = on_one_process[0]
        wrong = [
            f"{level} counts {count} of {reference} samples on {ranks} rank{'s' if ranks > 1 else ''}"
            for (level, ranks), count in counted.items()
            if count != reference
        ]
        if wrong:
            return Verdict(False, f"INEXACT: {listed(wrong)}")
    if missing or not on_one_process:
        return Verdict(None, f"EXACT? no evaluation of {listed(missing)}")
    world_sizes = sorted({ranks for _, ranks in counted})
    return Verdict(True, f"EXACT: {reference} of {reference} samples on {listed(map(str, world_sizes))} ranks")


def _evaluated(level: str, result: dict) -> dict[int, int]:
    """The number of samples that the level evaluated, by the number of ranks."""
    counted = {}
    if "run" in result:
        ranks = result["run"]["world_size"] if level in ladder.DISTRIBUTED else 1
        counted[ranks] = result["run"]["evaluated"]
    for ranks, count in result.get("evaluated_on", {}).items():
        counted[int(ranks)] = count
    return counted


def balanced(levels: dict[str, dict]) -> Verdict:
    """The verdict on memory: do DDP's ranks hold the same? Nothing is promised of DataParallel's devices."""
    missing = [level for level in levels if level in ON_DEVICES and not _peak_of_each_device(levels[level])]
    if missing:
        return Verdict(None, f"BALANCED? no memory of {listed(missing)}")
    of_ddp = {level: spread(peaks(result)) for level, result in levels.items() if level in ladder.DISTRIBUTED}
    of_data_parallel = spread(peaks(levels["01_data_parallel"]))
    line = f"fullest device over emptiest: DDP {max(of_ddp.values()):.2f}, DataParallel {of_data_parallel:.2f}"
    uneven = [level for level, fullest in of_ddp.items() if fullest > MOST_SPREAD]
    if uneven:
        return Verdict(False, f"UNBALANCED: {line} (at {listed(uneven)})")
    return Verdict(True, f"BALANCED: {line}")


def peaks(result: dict) -> list[int]:
    """Peak bytes per device of a level: the allocator's where it kept them for each device, else simulated."""
    if _measured(result):
        return result["run"]["peak_memory_bytes"]
    return [sum(split.values()) for split in result.get("simulated_peak_memory", [])]


def _peak_of_each_device(result: dict) -> bool:
    """Has every process or replica of the level a peak of its own? One for several says nothing of balance."""
    devices = result.get("run", {}).get("world_size", 1)
    return len(peaks(result)) >= devices


def _measured(result: dict) -> bool:
    """Did the allocator keep the peak of each process or replica apart? Replicas on one GPU have none of their own."""
    run = result.get("run", {})
    allocated = run.get("peak_memory_bytes") or []
    devices = max(run.get("world_size", 1), len(result.get("simulated_peak_memory", [])))
    return len(allocated) >= devices


def memory_source(levels: dict[str, dict]) -> str:
    """The source of the levels' `peaks`. Replicas that share a GPU are simulated beside measured processes."""
    known = [level for level, result in levels.items() if peaks(result)]
    simulated = [level for level in known if not _measured(levels[level])]
    if simulated == known:
        return "simulated, each tensor charged to its device"
    return "measured by CUDA's allocator" + (f", that of {listed(simulated)} simulated" if simulated else "")


def spread(sizes: list[int]) -> float:
    """The fullest device over the emptiest one: 1 is balance, infinity a device that held nothing."""
    emptiest = min(sizes)
    if emptiest == 0:
        return math.inf
    return max(sizes) / emptiest


def listed(words) -> str:
    """'a', 'a and b', 'a, b and c'."""
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else str(last)
