"""A comparison in the terminal, in 80 columns: the speeds, the checks, and the verdicts."""

import textwrap

from benchmarks.harness.records import Group, read_group, totals
from benchmarks.harness.rows import BASELINE
from benchmarks.report.cells import MISSING, are_measured, cores_of_devices, label, peaks, per_device
from benchmarks.report.verdicts import verdicts
from common import ladder

SPEED_COLUMNS = "{:<24} {:>7} {:>9} {:>10} {:>26}"
CHECK_COLUMNS = "{:<16} {:>9} {:>9} {:>9} {:>16} {:>16}"
TERMINAL_COLUMNS = 80


def summary(report: dict) -> str:
    lines = [f"{tables(report)}\n"]
    lines += [wrapped(verdict.line) for verdict in verdicts(report)]
    return "\n".join(lines)


def tables(report: dict) -> str:
    """The speeds at each batch, and what each level computed."""
    blocks = [_speeds(read_group(group)) for group in report["throughput"]]
    return "\n\n".join([*blocks, _checks(report)])


def _speeds(group: Group) -> str:
    """A line for each row of a group: its speed, and how many times as fast as level 00 on one device it is."""
    speed_ups = group.compared_with(BASELINE)
    heading = f"Speed at {group.title}, medians of {group.rounds} rounds"
    if cores := cores_of_devices(group.rows.values()):
        heading += f", {cores} for each device"
    confidence = min(speed_up.interval.confidence for speed_up in speed_ups.values())
    last_column = f"× level 00 ({confidence:.0%} interval)"
    lines = [heading, SPEED_COLUMNS.format("level", "devices", "images/s", "spread", last_column)]
    for name, row in group.rows.items():
        ratio = "1"
        if name != BASELINE:
            interval = speed_ups[name].interval
            ratio = f"{speed_ups[name].summary.median:.2f} ({interval.low:.2f} to {interval.high:.2f})"
        devices = MISSING if row.facts["all_cores"] else row.facts["workers"]
        spread = f"{row.summary.spread:.0%}{' noisy' if row.summary.noisy else ''}"
        lines.append(SPEED_COLUMNS.format(label(name, row), devices, f"{row.summary.median:.0f}", spread, ratio))
    return "\n".join(lines)


def _checks(report: dict) -> str:
    """A line for each level and sharded script: accuracy, evaluated samples, memory and weights."""
    levels = report["levels"]
    datasets = sorted({result["run"]["dataset"] for result in levels.values()})
    heading = f"Training: {report['steps']} steps on {', '.join(datasets)}"
    if "synthetic" in datasets:
        heading += ": NOT MNIST"
    measured = are_measured(levels)
    source = "measured MiB," if measured else "simulated MiB,"
    lines = [
        heading,
        CHECK_COLUMNS.format("", "", "", "", source, "weight"),
        CHECK_COLUMNS.format("level", "processes", "accuracy", "evaluated", "peak per device", "checksum"),
    ]
    for level, sizes in peaks(levels).items():
        result = levels[level]
        run = result["run"]
        processes = run["world_size"] if level in ladder.DISTRIBUTED else 1
        cells = [processes, f"{run['accuracy']:.2%}", run["evaluated"], per_device(sizes)]
        lines.append(CHECK_COLUMNS.format(level, *cells, result["weight_checksum"]))
    for script, result in report["sharded"].items():
        sizes = totals(result["simulated_peak_memory"])
        memory = MISSING if measured else per_device(sizes)
        cells = [len(sizes), MISSING, MISSING, memory]
        lines.append(CHECK_COLUMNS.format(ladder.short_name(script), *cells, result["weight_checksum"]))
    return "\n".join(lines)


def wrapped(text: str) -> str:
    return textwrap.fill(text, TERMINAL_COLUMNS, break_on_hyphens=False)
