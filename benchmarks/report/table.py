"""A comparison in the terminal: the speeds, the checks, where a step's time goes, and the verdicts."""

import textwrap

from benchmarks.harness.rows import FIRST, RAW_DDP, is_share
from benchmarks.report.verdicts import are_measured, peaks, verdicts
from common import ladder
from common.instruments.result import quantity

SPEED_COLUMNS = "{:<24} {:>7} {:>9} {:>10} {:>26}"
CHECK_COLUMNS = "{:<16} {:>9} {:>9} {:>9} {:>16} {:>16}"
MISSING = "–"
WIDTH = 80  # columns of a terminal


def summary(report: dict) -> str:
    """All that a comparison has found, in 80 columns."""
    lines = [f"{failure['part']}:\n{failure['message']}\n" for failure in report["failures"]]
    lines.append(f"{tables(report)}\n")
    for group in report.get("throughput", []):
        lines += map(wrapped, where_time_goes(group["rows"]))
    lines += [wrapped(f"FAILED: {failure['part']}") for failure in report["failures"]]
    if report["interrupted"]:
        lines.append("INTERRUPTED: what is missing was not run.")
    lines += [wrapped(verdict.line) for verdict in verdicts(report)]
    return "\n".join(lines)


def tables(report: dict) -> str:
    """The speeds at each batch, and what each level computed; a dash where there is no result."""
    blocks = [_speeds(group) for group in report.get("throughput", [])]
    return "\n\n".join([*blocks, _checks(report)])


def _speeds(group: dict) -> str:
    pairs = {pair["of"]: pair for pair in group["pairs"] if pair["to"] == FIRST}
    sure = max((pair["confidence"] for pair in pairs.values()), default=0)
    lines = [f"Speed at {group['group']}, medians of {group['rounds']} rounds"]
    cores = {row["cores_per_device"] for row in group["rows"].values()} - {None}
    if cores:
        lines[0] += f", {quantity(min(cores), 'core')} for each device"
    lines.append(SPEED_COLUMNS.format("level", "devices", "images/s", "spread", f"× level 00 ({sure:.0%} interval)"))
    for name, row in group["rows"].items():
        if is_share(row):
            continue
        ratio = "1" if name == FIRST else MISSING
        if name in pairs:
            low, high = pairs[name]["interval"]
            ratio = f"{pairs[name]['median']:.2f} ({low:.2f} to {high:.2f})"
        label, devices = (name, MISSING) if row["apart"] else (row["level"], row["workers"])
        spread = f"{row['spread']:.0%}{' noisy' if row['noisy'] else ''}"
        lines.append(SPEED_COLUMNS.format(label, devices, f"{row['median']:.0f}", spread, ratio))
    return "\n".join(lines)


def _checks(report: dict) -> str:
    levels = report["levels"]
    datasets = sorted({result["run"]["dataset"] for result in levels.values() if "run" in result})
    lines = [f"Training: {report['steps']} steps on {', '.join(datasets) or MISSING}"]
    if "synthetic" in datasets:
        lines[0] += ": NOT MNIST"
    source = "measured MiB," if are_measured(levels) else "simulated MiB,"
    lines.append(CHECK_COLUMNS.format("", "", "", "", source, "weight").rstrip())
    lines.append(CHECK_COLUMNS.format("level", "processes", "accuracy", "evaluated", "peak per device", "checksum"))
    for level, sizes in peaks(levels).items():
        result = levels[level]
        cells = [MISSING, MISSING, MISSING]
        if "run" in result:
            run = result["run"]
            processes = run["world_size"] if level in ladder.DISTRIBUTED else 1
            cells = [processes, f"{run['accuracy']:.2%}", run["evaluated"]]
        checksum = result.get("weight_checksum", MISSING)
        lines.append(CHECK_COLUMNS.format(level, *cells, per_device(sizes) or MISSING, checksum))
    sharded = report.get("sharded", {})
    sizes_of = {} if are_measured(levels) else peaks(sharded)  # theirs are simulated
    for rung, result in sharded.items():
        cells = [len(result.get("simulated_peak_memory", [])) or MISSING, MISSING, MISSING]
        memory = per_device(sizes_of.get(rung, [])) or MISSING
        checksum = result.get("weight_checksum", MISSING)
        lines.append(CHECK_COLUMNS.format(ladder.short_name(rung), *cells, memory, checksum))
    return "\n".join(lines)


def per_device(sizes: list[int]) -> str:
    """'51', '39 22' or, where all but the first are alike, '38 7×16'; empty for no devices."""
    mib = [f"{size / 2**20:.0f}" for size in sizes]
    others = mib[1:]
    if len(others) > 1 and len(set(others)) == 1:
        return f"{mib[0]} {len(others)}×{others[0]}"
    return " ".join(mib)


def where_time_goes(rows: dict[str, dict]) -> list[str]:
    """A line on a step of level 02 on several devices: what a device computes, and what the others add.

    All of it is measured in the same rounds: the step of one device, that of level 02 on several, and what one of the
    several has to compute, alone on its device. There is no line where one of the three is missing. The time for
    working together is sending, waiting for the slowest device, and what devices of one machine take from each other.
    """
    one = [row for row in rows.values() if row["level"] == FIRST and not row["apart"]]
    shares = [row for row in rows.values() if is_share(row)]
    several = [row for row in rows.values() if row["level"] == RAW_DDP and row["workers"] > 1]
    if not (one and shares and several):
        return []
    whole, share, ddp = (_step_milliseconds(found[0]) for found in (one, shares, several))
    return [
        f"A step of {several[0]['global_batch_size']}: {whole:.1f} ms on 1 device; {ddp:.1f} on "
        f"{several[0]['workers']}: {share:.1f} for one share alone, {ddp - share:.1f} for working together"
    ]


def _step_milliseconds(row: dict) -> float:
    return 1000 * row["global_batch_size"] / row["median"]


def wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_on_hyphens=False)
