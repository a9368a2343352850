"""The pictures of memory, drawn from records alone: what each device holds, at its peak or between two steps."""

from pathlib import Path

from benchmarks.harness.rows import DATA_PARALLEL, DDP, totals
from benchmarks.report.plots import (
    BLUE,
    CLEAR,
    GREEN,
    GREY,
    INK,
    ORANGE,
    SKY,
    SMALL,
    VERMILION,
    legend,
    save,
    subplots,
)
from benchmarks.report.verdicts import spread
from common.memory import CATEGORIES

COLOURS = dict(zip(CATEGORIES, (BLUE, ORANGE, GREEN, SKY, VERMILION, GREY), strict=True))
LEGEND = 0.58  # inches
# Of each wrapper a title, the names of four devices, and texts above the bar of a device, each with its middle.
FOUR_DEVICES = {
    DATA_PARALLEL: (
        "DataParallel: one process",
        ("device 0", "1", "2", "3"),
        {
            0: (1.25, "device 0 also has the optimizer\nand sums all gradients"),
            1: (2.0, "a copy of the network,\na shard of the batch"),
        },
    ),
    DDP: (
        "DDP: four processes",
        ("rank 0", "1", "2", "3"),
        {0: (1.5, "each has a network, an optimizer,\nand buckets for its gradients")},
    ),
}
# What each rank has of BasicNet.
SHARED_OUT = {
    "DDP": "everything",
    "FSDP": "1/4 of each\nparameter",
    "mesh of 2 × 2": "1/4 of fc1 and\nfc2, 1/2 of the\nconvolutions",
}


def all_devices(report: dict, path: Path) -> None:
    """Peak memory of every device under DataParallel and under DDP, for each network and number of devices."""
    recorded = report.get("memory", [])
    rows = [row for row in recorded if row["devices"] > 1 and row["wrapper"] in (DATA_PARALLEL, DDP)]
    if not rows:
        return
    titles = {row["network"]: f"{row['title']}, global batch {row['global_batch_size']}" for row in rows}
    counts = sorted({row["devices"] for row in rows})
    widths = [count + 2.5 for count in counts]
    figure, panels = subplots(len(titles), len(counts), 1.85 + 2.7 * len(titles), widths)
    for line, network in enumerate(titles):
        own = [row for row in rows if row["network"] == network]
        top = max(max(_heights(row)) for row in own)
        for column, devices in enumerate(counts):
            panel = panels[line * len(counts) + column]
            for row in own:
                if row["devices"] == devices:
                    _devices(panel, row, top)
            panel.set_xticks([(devices - 1) / 2, devices + 1 + (devices - 1) / 2], ["DP", "DDP"])
            panel.set(xlim=(-1.1, 2 * devices + 1.1), ylim=(0, 1.32 * top))
            panel.grid(axis="y")
            panel.set_title(" ")  # room for the network's name, which is wider than the first panel
            panel.tick_params(axis="x", length=0)
            if column:
                panel.tick_params(axis="y", labelleft=False)
            else:
                panel.set_ylabel("peak MiB per device")
                panel.text(0, 1.06, titles[network], transform=panel.transAxes, weight="bold", in_layout=False)
            panel.set_xlabel(f"{devices} devices")
    legend(figure, COLOURS, 3)
    told = "Simulated: every tensor charged to its device"
    if any(row["allocated"] for row in rows):
        told = "Bars: simulated, every tensor charged to its device; diamonds: measured by CUDA's allocator"
    save(figure, path, f"{told}. DP: DataParallel; ratio: fullest / emptiest device", report["machine"], LEGEND)


def _devices(panel, row: dict, top: float) -> None:
    """The bars of one wrapper's devices: DataParallel's left, DDP's right."""
    n = row["devices"]
    start = 0 if row["wrapper"] == DATA_PARALLEL else n + 1
    for device, split in enumerate(row["peaks"]):
        _stack(panel, start + device, split)
    if row["allocated"]:
        panel.plot(range(start, start + n), [size / 2**20 for size in row["allocated"]], "D", color=INK, markersize=4)
    middle = start + (n - 1) / 2
    above = max(_heights(row)) + 0.03 * top
    ratio = f"ratio\n{spread(totals(row)):.2f}"
    panel.text(middle, above, ratio, ha="center", va="bottom", fontsize=SMALL, bbox=CLEAR)


def _stack(panel, position: float, split: dict[str, int]) -> None:
    """The bar of one device, made of what it holds."""
    below = 0.0
    for name in split:
        size = split[name] / 2**20
        panel.bar(position, size, 0.86, below, color=COLOURS[name])
        below += size


def _ranks(panel, title: str, names: tuple[str, ...], splits: list[dict[str, int]], top: float) -> None:
    """The bars of four devices, side by side."""
    for device, split in enumerate(splits):
        _stack(panel, device, split)
    panel.set_title(title)
    panel.set_xticks(range(len(splits)), names)
    panel.set(xlim=(-0.6, 3.6), ylim=(0, top))
    panel.grid(axis="y")
    panel.tick_params(axis="x", length=0)


def _heights(row: dict) -> list[float]:
    sizes = [sum(split.values()) for split in row["peaks"]] + (row["allocated"] or [])
    return [size / 2**20 for size in sizes]


def four_devices(report: dict, path: Path) -> None:
    """Each of four devices' memory in BasicNet's training, under DataParallel and under DDP, with what it means."""
    rows = {}
    for row in report.get("memory", []):
        if row["network"] == "basic_net" and row["devices"] == 4:
            rows[row["wrapper"]] = row
    if not rows:
        return
    top = max(max(_heights(rows[wrapper])) for wrapper in FOUR_DEVICES)
    figure, panels = subplots(1, len(FOUR_DEVICES), 4.8)
    for panel, (wrapper, (title, names, texts)) in zip(panels, FOUR_DEVICES.items(), strict=True):
        peaks = rows[wrapper]["peaks"]
        _ranks(panel, title, names, peaks, 1.25 * top)
        for device, (middle, text) in texts.items():
            height = sum(peaks[device].values()) / 2**20 + 0.02 * top
            panel.text(middle, height, text, ha="center", va="bottom", fontsize=SMALL, bbox=CLEAR)
        panel.tick_params(axis="y", labelleft=panel is panels[0])
    panels[0].set_ylabel("peak MiB")
    legend(figure, COLOURS, 3)
    told = "Simulated: every tensor charged to its device. BasicNet, global batch 64. Each device at its own peak"
    save(figure, path, told, report["machine"], LEGEND)


def sharing(record: dict, path: Path) -> None:
    """What each of four ranks holds of parameters, gradients and optimizer state under DDP, FSDP and on a mesh."""
    rows = record["rows"]
    top = max(max(sum(split.values()) for split in ranks) for ranks in rows.values()) / 2**20
    figure, panels = subplots(1, len(rows), 4.3)
    for panel, (name, ranks) in zip(panels, rows.items(), strict=True):
        _ranks(panel, name, ("rank 0", "1", "2", "3"), ranks, 1.2 * top)
        height = sum(ranks[0].values()) / 2**20
        panel.text(1.5, height + 0.03 * top, SHARED_OUT[name], ha="center", va="bottom", fontsize=SMALL, bbox=CLEAR)
        panel.tick_params(axis="y", labelleft=panel is panels[0])
    panels[0].set_ylabel("MiB between two steps")
    legend(figure, {category: COLOURS[category] for category in rows["DDP"][0]}, 3)
    told = "Simulated: every tensor charged to its rank. BasicNet, four ranks of level 02; a copy is 18 MiB"
    save(figure, path, told, record["machine"], 0.32)
