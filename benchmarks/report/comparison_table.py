"""A comparison in the terminal, in 80 columns: the speeds, the checks, and the verdicts."""

import textwrap

from benchmarks.harness.records import totals
from benchmarks.harness.rows import BASELINE
from benchmarks.report.cells import MISSING, are_measured, label, peaks, per_device, speed_ups
from benchmarks.report.verdicts import verdicts
from common import ladder
from common.instruments.result import quantity

SPEED_COLUMNS = "{:<24} {:>7} {:>9} {:>10} {:>26}"
CHECK_COLUMNS = "{:<16} {:>9} {:>9} {:>9} {:>16} {:>16}"
TERMINAL_COLUMNS = 80


def summary(report: dict) -> str:
    lines = [f"{tables(report)}\n"]
    lines += [wrapped(verdict.line) for verdict in verdicts(report)]
    return "\n".join(lines)


def tables(report: dict) -> str:
    """The speeds at each batch, and what each level computed."""
    blocks = [_speeds(group) for group in report["throughput"]]
    return "\n\n".join([*blocks, _checks(report)])


def _speeds(group: dict) -> str:
    """A line for each row of a group: its speed, and how many times as fast as level 00 on one device it is."""
    pairs = speed_ups(group)
    heading = f"Speed at {group['group']}, medians of {group['rounds']} rounds"
    cores = {row["cores_per_device"] for row in group["rows"].values()} - {None}
    if cores:
        heading += f", {quantity(min(cores), 'core')} for each device"
    confidence = min(pair["confidence"] for pair in pairs.values())
    speed_up = f"× level 00 ({confidence:.0%} interval)"
    lines = [heading, SPEED_COLUMNS.format("level", "devices", "images/s", "spread", speed_up)]
    for name, row in group["rows"].items():
        ratio = "1"
        if name != BASELINE:
            low, high = pairs[name]["interval"]
            ratio = f"{pairs[name]['median']:.2f} ({low:.2f} to {high:.2f})"
        devices = MISSING if row["all_cores"] else row["workers"]
        spread = f"{row['spread']:.0%}{' noisy' if row['noisy'] else ''}"
        lines.append(SPEED_COLUMNS.format(label(name, row), devices, f"{row['median']:.0f}", spread, ratio))
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
