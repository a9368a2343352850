"""A comparison in the terminal: the table of the levels, what its columns mean, and the verdicts."""

from benchmarks.report.introduction import busy
from benchmarks.report.verdicts import memory_source, peaks, verdicts
from benchmarks.report.wrapping import wrapped
from common import ladder

COLUMNS = "{:<16} {:>5} {:>8} {:>8} {:>8} {:>6} {:>12} {:>8}"
MISSING = "–"
HEADINGS = [
    ["", "pro-", "", "eval-", "images", "", "peak MiB", "weight"],
    ["level", "cess", "accuracy", "uated", "per s", "spread", "per device", "checksum"],
]


def table(report: dict) -> str:
    """The comparison in 80 columns; a dash where there is no result."""
    rows = [*HEADINGS, *cells(report)]
    lines = [COLUMNS.format(*row) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def cells(report: dict) -> list[list[str]]:
    """The table's cells, a row for each level; a dash for a result that is missing."""
    times = timed(report)
    rows = []
    for level, result in report["levels"].items():
        run = _run_cells(level, result.get("run"))
        speed = _speed_cells(times.get(level))
        memory = per_device(peaks(result)) or MISSING
        checksum = result.get("weight_checksum", MISSING)
        rows.append([level, *run, *speed, memory, checksum])
    return rows


def _run_cells(level: str, run: dict | None) -> list[str]:
    """Processes, accuracy, evaluated samples."""
    if run is None:
        return [MISSING, MISSING, MISSING]
    processes = run["world_size"] if level in ladder.DISTRIBUTED else 1
    return [str(processes), f"{run['accuracy']:.2%}", str(run["evaluated"])]


def _speed_cells(row: dict | None) -> list[str]:
    """Images per second, spread."""
    if row is None:
        return [MISSING, MISSING]
    mark = "*" if row["noisy"] else ""
    return [f"{row['median']:.0f}", f"{row['spread']:.0%}{mark}"]


def timed(report: dict) -> dict[str, dict]:
    """Of each level the throughput at the usual batch: a row of `benchmarks.harness.records.group`."""
    groups = report.get("throughput") or [{"rows": {}}]
    return {row["level"]: row for row in groups[0]["rows"].values()}


def per_device(sizes: list[int]) -> str:
    """'51', '39 22' or, where all but the first are alike, '38 7×16'; empty for no devices."""
    if not sizes:
        return ""
    first, *others = [f"{size / 2**20:.0f}" for size in sizes]
    if len(others) > 1 and len(set(others)) == 1:
        others = [f"{len(others)}×{others[0]}"]
    return " ".join([first, *others])


def notes(report: dict) -> str:
    """The meaning of the columns, the levels that did not run, and the verdicts."""
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
        lines.append(f"Images per s: median of {count} rounds in turn; spread: their middle half.{noisy}")
    for group in report.get("throughput") or []:
        lines += [f"At {group['group']}, {note}" for note in group.get("notes", [])]
    lines.append(f"Weights: after {report['proof_steps']} steps in float64 without dropout, to four decimals.")
    lines += troubles(report)
    lines += [verdict.line for verdict in verdicts(report)]
    return "\n".join(wrapped(line) for line in lines)


def troubles(report: dict) -> list[str]:
    """A line for each part that failed, one if the user stopped it, and one if others used the machine."""
    lines = [f"FAILED: {failure['part']}" for failure in report["failures"]]
    if slowed := busy(report):
        lines.append(slowed)
    if report["interrupted"]:
        lines.append("INTERRUPTED: what is missing was not run.")
    return lines
