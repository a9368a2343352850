"""The pictures of memory, drawn from records alone: what each device holds, at its peak or after `optimizer.step()`."""

from itertools import product
from pathlib import Path

from benchmarks.harness.records import totals
from benchmarks.harness.rows import DATA_PARALLEL, DDP
from benchmarks.report import plots
from benchmarks.report.verdicts import imbalance
from benchmarks.suites.memory import MemoryRow
from common.memory import CATEGORIES

COLOURS = dict(
    zip(CATEGORIES, (plots.BLUE, plots.ORANGE, plots.GREEN, plots.SKY, plots.VERMILION, plots.GREY), strict=True)
)
LEGEND_INCHES = 0.58
PANEL_INCHES = 2.7
AROUND_INCHES = 1.85  # Legend, names of the axes and caption stand above and below all panels.
MARGIN = 1.1  # Empty space at each side, in widths of a bar.
HEADROOM = 1.32  # The y axis ends at this multiple of the highest bar, which leaves two lines for the ratio.
ABOVE_BARS = {"ha": "center", "va": "bottom", "fontsize": plots.SMALL, "bbox": plots.CLEAR}


def draw_devices(report: dict, path: Path) -> None:
    """Peak memory of every device under DataParallel and under DDP: a line of panels for each network."""
    recorded = [MemoryRow(**row) for row in report["memory"]]
    rows = [row for row in recorded if row.wrapper in (DATA_PARALLEL, DDP)]
    titles = {row.network: f"{row.title}, global batch {row.global_batch_size}" for row in rows}
    counts = sorted({row.devices for row in rows})
    widths = [count + 2.5 for count in counts]
    height = AROUND_INCHES + PANEL_INCHES * len(titles)
    figure, panels = plots.subplots(len(titles), len(counts), height, width_ratios=widths)
    for (network, devices), panel in zip(product(titles, counts), panels, strict=True):
        network_rows = [row for row in rows if row.network == network]
        top = max(max(_mib(row.peaks)) for row in network_rows)
        _panel(panel, {row.wrapper: row.peaks for row in network_rows if row.devices == devices}, top)
        is_first = devices == counts[0]
        panel.tick_params(axis="y", labelleft=is_first)
        if is_first:
            panel.set_ylabel("peak MiB per device")
            # y = 1.06 is just above the panel. in_layout=False, because the name is wider than it.
            panel.text(0, 1.06, titles[network], transform=panel.transAxes, weight="bold", in_layout=False)
    plots.legend(figure, COLOURS, 3)
    caption = "Simulated: every tensor charged to its device. DP: DataParallel; ratio: fullest / emptiest device"
    plots.save(figure, path, caption, report["machine"], LEGEND_INCHES)


def _panel(panel, peaks: dict[str, list[dict[str, int]]], top: float) -> None:
    """DataParallel's bars left and DDP's right, one for each device; `top` is the highest bar of the network."""
    devices = len(peaks[DDP])
    middles = []
    for start, wrapper in ((0, DATA_PARALLEL), (devices + 1, DDP)):
        for device, split in enumerate(peaks[wrapper]):
            _stack(panel, start + device, split)
        heights = _mib(peaks[wrapper])
        middles.append(start + (devices - 1) / 2)
        panel.text(middles[-1], max(heights) + 0.03 * top, f"ratio\n{imbalance(heights):.2f}", **ABOVE_BARS)
    panel.set_xticks(middles, ["DP", "DDP"])
    panel.set(xlim=(-MARGIN, 2 * devices + MARGIN), ylim=(0, HEADROOM * top))
    panel.grid(axis="y")
    panel.set_title(" ")  # room for the network's name
    panel.tick_params(axis="x", length=0)
    panel.set_xlabel(f"{devices} devices")


def _stack(panel, position: float, split: dict[str, int]) -> None:
    below = 0.0
    for category, size in split.items():
        height = size / 2**20
        panel.bar(position, height, 0.86, below, color=COLOURS[category])
        below += height


def _mib(devices: list[dict[str, int]]) -> list[float]:
    return [size / 2**20 for size in totals(devices)]


def draw_sharing(record: dict, path: Path) -> None:
    """The memory of each rank at the end of `optimizer.step()`, without DDP's buckets: a panel for each script."""
    rows = record["rows"]
    top = max(max(_mib(ranks)) for ranks in rows.values())
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
    panels[0].set_ylabel("MiB after optimizer.step()")
    first_ranks = next(iter(rows.values()))
    shown = {category: COLOURS[category] for category in first_ranks[0]}
    plots.legend(figure, shown, len(shown))
    caption = "Simulated: every tensor charged to its rank. BasicNet, ranks of level 02"
    plots.save(figure, path, caption, record["machine"], 0.32)
