"""The pictures of memory, drawn from records alone: what each device holds, at its peak or between two steps."""

from pathlib import Path

from benchmarks.harness.rows import DATA_PARALLEL, DDP, totals
from benchmarks.report import plots
from benchmarks.report.verdicts import spread
from common.memory import CATEGORIES

COLOURS = dict(
    zip(CATEGORIES, (plots.BLUE, plots.ORANGE, plots.GREEN, plots.SKY, plots.VERMILION, plots.GREY), strict=True)
)
LEGEND = 0.58  # inches
ABOVE_BARS = {"ha": "center", "va": "bottom", "fontsize": plots.SMALL, "bbox": plots.CLEAR}


def all_devices(report: dict, path: Path) -> None:
    """Peak memory of every device under DataParallel and under DDP, for each network and number of devices."""
    rows = [row for row in report["memory"] if row["wrapper"] in (DATA_PARALLEL, DDP)]
    titles = {row["network"]: f"{row['title']}, global batch {row['global_batch_size']}" for row in rows}
    counts = sorted({row["devices"] for row in rows})
    widths = [count + 2.5 for count in counts]
    figure, panels = plots.subplots(len(titles), len(counts), 1.85 + 2.7 * len(titles), widths)
    for line, network in enumerate(titles):
        own = [row for row in rows if row["network"] == network]
        top = max(max(_mib(row["peaks"])) for row in own)
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
    plots.legend(figure, COLOURS, 3)
    caption = "Simulated: every tensor charged to its device. DP: DataParallel; ratio: fullest / emptiest device"
    plots.save(figure, path, caption, report["machine"], LEGEND)


def _devices(panel, row: dict, top: float) -> None:
    """The bars of one wrapper's devices: DataParallel's left, DDP's right."""
    n = row["devices"]
    start = 0 if row["wrapper"] == DATA_PARALLEL else n + 1
    for device, split in enumerate(row["peaks"]):
        _stack(panel, start + device, split)
    heights = _mib(row["peaks"])
    above = max(heights) + 0.03 * top
    panel.text(start + (n - 1) / 2, above, f"ratio\n{spread(heights):.2f}", **ABOVE_BARS)


def _stack(panel, position: float, split: dict[str, int]) -> None:
    """The bar of one device, made of what it holds."""
    below = 0.0
    for category, size in split.items():
        height = size / 2**20
        panel.bar(position, height, 0.86, below, color=COLOURS[category])
        below += height


def _mib(devices: list[dict[str, int]]) -> list[float]:
    """The height of each device's bar."""
    return [size / 2**20 for size in totals(devices)]


def sharing(record: dict, path: Path) -> None:
    """What each rank holds of parameters, gradients and optimizer state: a panel for each way."""
    rows = record["rows"]
    top = 0.0
    for ranks in rows.values():
        top = max(top, *_mib(ranks))
    figure, panels = plots.subplots(1, len(rows), 4.3)
    for panel, (name, ranks) in zip(panels, rows.items(), strict=True):
        for rank, split in enumerate(ranks):
            _stack(panel, rank, split)
        panel.set_title(name)
        panel.set_xticks(range(len(ranks)), ["rank 0", *range(1, len(ranks))])
        panel.set(xlim=(-0.6, len(ranks) - 0.4), ylim=(0, 1.2 * top))
        panel.grid(axis="y")
        panel.tick_params(axis="x", length=0)
        fullest = max(_mib(ranks))
        panel.text((len(ranks) - 1) / 2, fullest + 0.03 * top, f"{fullest:.1f} MiB each", **ABOVE_BARS)
        panel.tick_params(axis="y", labelleft=panel is panels[0])
    panels[0].set_ylabel("MiB between two steps")
    shown = {category: COLOURS[category] for category in ranks[0]}
    plots.legend(figure, shown, len(shown))
    caption = "Simulated: every tensor charged to its rank. BasicNet, ranks of level 02"
    plots.save(figure, path, caption, record["machine"], 0.32)
