"""The cells of tables and the labels of pictures: names of rows, speed-ups, and memory of each device."""

from collections.abc import Iterable

from benchmarks.harness.formats import mib
from benchmarks.harness.records import Row, totals
from common.instruments.result import quantity

MISSING = "–"


def label(name: str, row: Row) -> str:
    """The level of a row of speeds; its whole name, "00_single_gpu, all cores", if one process has all cores."""
    return name if row.facts["all_cores"] else row.facts["level"]


def cores_of_devices(rows: Iterable[Row]) -> str | None:
    """The cores of each device in these rows; None where devices are not made of cores."""
    cores = {row.facts["cores_per_device"] for row in rows} - {None}
    return quantity(min(cores), "core") if cores else None


def per_device(sizes: list[int]) -> str:
    """MiB: '51', '39 22' or, where all but the first are alike, '38 7×16'."""
    first, *others = [mib(size, 0) for size in sizes]
    if len(others) > 1 and len(set(others)) == 1:
        return f"{first} {len(others)}×{others[0]}"
    return " ".join([first, *others])


def peaks(levels: dict[str, dict]) -> dict[str, list[int]]:
    """The peak bytes of each device, by level. See `are_measured`."""
    if are_measured(levels):
        return {level: result["run"]["peak_memory_bytes"] for level, result in levels.items()}
    return {level: totals(result["simulated_peak_memory"]) for level, result in levels.items()}


def are_measured(levels: dict[str, dict]) -> bool:
    """True if the allocator kept a peak for each device of every level. Replicas on one GPU have none of their own.

    If one is missing, the accounting's peaks count for all levels, so that they can be compared.
    """
    for result in levels.values():
        run = result["run"]
        devices = max(run["world_size"], len(result["simulated_peak_memory"]))
        if len(run["peak_memory_bytes"] or []) < devices:
            return False
    return True
