"""The tables of recorded results on the pages."""

import json

from benchmarks.harness.formats import mib
from benchmarks.harness.records import Group, read_group, totals
from benchmarks.harness.rows import BASELINE, BUCKET_VIEWS, DATA_PARALLEL, DDP, FOREACH, FSDP2
from benchmarks.report import comparison_table
from benchmarks.report.cells import MISSING, label, peaks, per_device
from benchmarks.suites.memory import DEVICES, MemoryRow
from common import ladder

RESULTS = ladder.ROOT / "benchmarks" / "results" / "intel-xeon-2-cores"
SPEED_HEAD = ("images/s", "× level 00")
MEMORY_HEAD = "MiB per device"


def recorded(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """A table whose first column is text, and the others numbers."""
    aligned = "|".join(["---", *["--:"] * (len(head) - 1)])
    lines = [f"| {' | '.join(cells)} |" for cells in [head, *rows]]
    return "\n".join([lines[0], f"|{aligned}|", *lines[1:]])


def text_of_comparison() -> str:
    """The output of `python -m benchmarks.compare` for the record."""
    return f"```text\n{comparison_table.summary(recorded('results'))}\n```"


def table_of_levels() -> str:
    """Speed at the smaller batch, memory and weights of each level; the speed of one process with all cores."""
    record = recorded("results")
    group = read_group(record["throughput"][0])
    memory = peaks(record["levels"])
    rows = []
    for name, row in group.rows.items():
        cells = [label(name, row), *speed_cells(group, name)]
        if row.facts["all_cores"]:
            cells += [MISSING, MISSING]
        else:
            level = row.facts["level"]
            cells += [per_device(memory[level]), record["levels"][level]["weight_checksum"]]
        rows.append(cells)
    return markdown(["level", *SPEED_HEAD, MEMORY_HEAD, "weights"], rows)


def speed_cells(group: Group, name: str) -> list[str]:
    """Images per second of a row, and the median of its rounds' ratios to level 00."""
    speed_up = 1.0 if name == BASELINE else group.compared_with(BASELINE)[name].summary.median
    return [f"{group.rows[name].summary.median:.0f}", f"{speed_up:.2f}"]


def table_of_epoch(level: str) -> str:
    """Accuracy and losses of one epoch at this level, and the speed and memory that `table_of_levels` has of it."""
    record = recorded("results")
    name = ladder.find_script(level)
    run = record["levels"][name]["run"]
    results = [f"{run['accuracy']:.2%}", f"{run['loss']:.4f}", f"{run['eval_loss']:.4f}"]
    group = read_group(record["throughput"][0])
    speed = speed_cells(group, row_of(group, name))
    memory = per_device(peaks(record["levels"])[name])
    return markdown(["accuracy", "loss", "eval loss", *SPEED_HEAD, MEMORY_HEAD], [[*results, *speed, memory]])


def row_of(group: Group, level: str) -> str:
    """The name of the row in which the level has a device for each worker."""
    (name,) = [name for name, row in group.rows.items() if label(name, row) == level]
    return name


def table_of_devices() -> str:
    """Peak MiB of BasicNet's training on several devices."""
    memory = recorded_peaks()
    rows = []
    for count in DEVICES:
        first, *others = totals(memory["basic_net", DATA_PARALLEL, count])
        other = max(others)
        ddp = max(totals(memory["basic_net", DDP, count]))
        rows.append([str(count), mib(first, 1), mib(other, 1), f"{first / other:.1f}", mib(ddp, 1)])
    return markdown(["devices", "first", "each of the others", "ratio", "DDP, each"], rows)


def table_of_categories() -> str:
    """BasicNet's memory on two devices at the peak of each, in MiB by category."""
    memory = recorded_peaks()
    first, second = memory["basic_net", DATA_PARALLEL, 2]
    ddp, _ = memory["basic_net", DDP, 2]
    splits = [first, second, ddp]
    rows = [[category, *(mib(split[category], 1) for split in splits)] for category in first]
    rows.append(["sum", *(mib(size, 1) for size in totals(splits))])
    return markdown(["MiB", "DataParallel, device 0", "DataParallel, device 1", "DDP, each"], rows)


def table_of_smaller_memory() -> str:
    """The fullest device's accounted peak under DDP and under what lowers it, in MiB, by network and devices."""
    columns = {DDP: "DDP", FOREACH: "foreach AdamW", BUCKET_VIEWS: "gradients in the buckets", FSDP2: "FSDP2"}
    memory = recorded_peaks()
    rows = []
    for name, title in (("basic_net", "BasicNet"), ("resnet18", "ResNet-18")):
        for count in DEVICES:
            fullest = [max(totals(memory[name, wrapper, count])) for wrapper in columns]
            rows.append([title, str(count), *(mib(size, 1) for size in fullest)])
    return markdown(["network", "devices", *columns.values()], rows)


def recorded_peaks() -> dict[tuple[str, str, int], list[dict[str, int]]]:
    """The recorded bytes of each device by category, under (network, wrapper, number of devices)."""
    rows = [MemoryRow(**row) for row in recorded("results")["memory"]]
    return {(row.network, row.wrapper, row.devices): row.peaks for row in rows}


def table_of_links() -> str:
    """Ratios of two nodes' throughput to one node's, in the same rounds, by link and by batch of each process."""
    group = read_group(*recorded("network")["groups"])
    cells_of_link: dict[str, list[str]] = {}
    for pair, summary, interval in group.comparisons:
        cells = cells_of_link.setdefault(group.rows[pair.of].facts["link"], [])
        cells.append(f"{summary.median:.2f} ({interval.low:.2f}–{interval.high:.2f})")
    rows = [[link, *cells] for link, cells in cells_of_link.items()]
    batches = sorted({row.facts["batch_per_process"] for row in group.rows.values()})
    return markdown(["link", *(f"batch {batch} each" for batch in batches)], rows)
