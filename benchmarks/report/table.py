"""A comparison in the terminal: the table of the levels, what its columns mean, and the verdicts."""

import textwrap

from benchmarks.report.verdicts import memory_source, peaks, verdicts
from benchmarks.suites.throughput import ALL_CORES, FIRST, where_time_goes
from common import ladder
from common.instruments.result import quantity

COLUMNS = "{:<16} {:>9} {:>9} {:>9} {:>16} {:>16}"
SPEED_COLUMNS = "{:<24} {:>7} {:>12} {:>7} {:>26}"
MISSING = "–"
WIDTH = 80  # columns of a terminal
HEADINGS = [
    ["", "", "", "", "peak MiB", "weight"],
    ["level", "processes", "accuracy", "evaluated", "per device", "checksum"],
]
SPEED_HEADINGS = ["level", "devices", "images per s", "spread", "of level 00 on one device"]


def table(report: dict) -> str:
    """The comparison in 80 columns, speeds first; a dash where there is no result."""
    blocks = [_speed_table(group) for group in report.get("throughput") or []]
    rows = [*HEADINGS, *cells(report)]
    blocks.append(_lines(COLUMNS, rows))
    return "\n\n".join(blocks)


def _speed_table(group: dict) -> str:
    headings = list(SPEED_HEADINGS)
    if not has_equal_devices(group):
        headings[-1] = "of level 00"
    lines = [speed_title(group), _lines(SPEED_COLUMNS, [headings, *speed_cells(group)])]
    return "\n".join(lines)


def _lines(columns: str, rows: list[list[str]]) -> str:
    lines = [columns.format(*row) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def speed_title(group: dict) -> str:
    """'Speed at global batch 64, 1 core for each device'."""
    cores = {row.get("cores_per_device") for row in group["rows"].values()} - {None}
    title = f"Speed at {group['group']}"
    if not cores:
        return title
    (each,) = cores
    return f"{title}, {quantity(each, 'core')} for each device"


def has_equal_devices(group: dict) -> bool:
    """Had level 00 one of the others' devices? In records of before it had all cores of a CPU."""
    for row in group["rows"].values():
        on_gpu = row.get("device", "cpu") != "cpu"
        if not (on_gpu or row.get("cores_per_device") or row.get("apart")):
            return False
    return True


def speed_cells(group: dict) -> list[list[str]]:
    """The cells of a group's speeds, a row for each level, and one apart for one process with all cores."""
    pairs = {pair["of"]: pair for pair in group["pairs"] if pair["to"] == FIRST}
    rows = []
    for name, row in shown_rows(group).items():
        mark = "*" if row["noisy"] else ""
        ratio = MISSING
        if name == FIRST:
            ratio = "1"
        elif name in pairs:
            low, high = pairs[name]["interval"]
            ratio = f"{pairs[name]['median']:.2f} ({low:.2f} to {high:.2f})"
        is_level = not row.get("apart")
        devices = str(row.get("workers", MISSING)) if is_level else MISSING
        label = row["level"] if is_level else name
        rows.append([label, devices, f"{row['median']:.0f}", f"{row['spread']:.0%}{mark}", ratio])
    return rows


def shown_rows(group: dict) -> dict[str, dict]:
    """The rows that do a whole step's work: not a share of its batch, which only serves an explanation."""
    return {name: row for name, row in group["rows"].items() if row.get("apart", "") in ("", ALL_CORES)}


def cells(report: dict) -> list[list[str]]:
    """The cells of what each level computed, a row for each; a dash for a result that is missing."""
    rows = []
    for level, result in report["levels"].items():
        run = _run_cells(level, result.get("run"))
        memory = per_device(peaks(result)) or MISSING
        checksum = result.get("weight_checksum", MISSING)
        rows.append([level, *run, memory, checksum])
    return rows


def _run_cells(level: str, run: dict | None) -> list[str]:
    """Processes, accuracy, evaluated samples."""
    if run is None:
        return [MISSING, MISSING, MISSING]
    processes = run["world_size"] if level in ladder.DISTRIBUTED else 1
    return [str(processes), f"{run['accuracy']:.2%}", str(run["evaluated"])]


def timed(report: dict) -> dict[str, dict]:
    """Of each level the throughput at the usual batch: a row of `benchmarks.harness.records.group`."""
    groups = report.get("throughput") or [{"rows": {}}]
    return {row["level"]: row for row in groups[0]["rows"].values() if not row.get("apart")}


def per_device(sizes: list[int]) -> str:
    """'51', '39 22' or, where all but the first are alike, '38 7×16'; empty for no devices."""
    if not sizes:
        return ""
    first, *others = [f"{size / 2**20:.0f}" for size in sizes]
    if len(others) > 1 and len(set(others)) == 1:
        others = [f"{len(others)}×{others[0]}"]
    return " ".join([first, *others])


def heading(report: dict) -> str:
    """The line before a comparison: the machine, and what every level does."""
    machine = report["machine"]
    hardware = ", ".join(machine["gpus"]) or "no GPU"
    return wrapped(
        f"torch {machine['torch']}, {machine['cores']} CPU cores, {hardware}. "
        f"Every level: global batch {report['global_batch_size']}, {report['steps']} steps, seed 42."
    )


def notes(report: dict) -> str:
    """The sources of the columns, the levels that did not run, where a step's time goes, and the verdicts."""
    datasets = {result["run"]["dataset"] for result in report["levels"].values() if "run" in result}
    names = ", ".join(sorted(datasets)) or "none"
    lines = []
    if "synthetic" in datasets:
        lines.append("NOT MNIST: synthetic digits.")
    lines.append(f"Dataset: {names}, {report['steps']} steps. Memory: {memory_source(report['levels'])}.")
    rows = timed(report)
    if rows:
        count = report["throughput"][0]["rounds"]
        is_noisy = any(row["noisy"] for row in rows.values())
        noisy = " *: noisy." if is_noisy else ""
        lines.append(f"Images/s: median of {count} rounds in turn; of level 00: {_confidence(report)}.{noisy}")
    for group in report.get("throughput") or []:
        lines += where_time_goes(group)
    lines += troubles(report)
    lines += [verdict.line for verdict in verdicts(report)]
    return "\n".join(wrapped(line) for line in lines)


def _confidence(report: dict) -> str:
    pairs = report["throughput"][0]["pairs"]
    known = [pair["confidence"] for pair in pairs if "confidence" in pair]  # not in records of before
    return f"of their ratios, and its {known[0]:.0%} interval" if known else "of their ratios"


def troubles(report: dict) -> list[str]:
    """A line for each part that failed, and one if the user stopped it."""
    lines = [f"FAILED: {failure['part']}" for failure in report["failures"]]
    if report["interrupted"]:
        lines.append("INTERRUPTED: what is missing was not run.")
    return lines


def wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_on_hyphens=False)
