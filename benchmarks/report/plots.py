"""The plots of a comparison, drawn from results alone: throughput per level, memory per device, overhead per step.

Each says below itself where its numbers come from. A plot whose results are missing is not drawn, and an older one of
its name goes, so that none can be taken for new. `benchmarks.report.network_plot` draws in the same style.
"""

import textwrap
from pathlib import Path
from typing import NamedTuple

from benchmarks.report.table import has_equal_devices, shown_rows
from benchmarks.report.verdicts import spread
from benchmarks.suites.memory import DDP, WRAPPERS, in_category, totals
from benchmarks.suites.throughput import FIRST, of_devices
from common.files import atomic_write
from common.memory import CATEGORIES

# Okabe and Ito's palette: told apart with any kind of colour vision. https://jfly.uni-koeln.de/color/
BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
SKY = "#56B4E9"
VERMILION = "#D55E00"
YELLOW = "#F0E442"
PURPLE = "#CC79A7"
GREY = "#B0B0B0"
PALE = "#D5DADF"
INK = "#1f2328"
SOFT = "#59636e"
COLOURS = dict(zip(CATEGORIES, (BLUE, ORANGE, GREEN, SKY, VERMILION, GREY), strict=True))
CLEAR = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # behind a number: no grid through it
WIDTH = 7.2  # inches: 12 points are 18 pixels in a README, and 8 on a phone, which shows a picture 360 pixels wide
SMALL = 11.6  # points: 8 pixels on a phone; no text is smaller
DPI = 220
STYLE = {
    "font.size": 12,
    "font.family": "DejaVu Sans",
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#e3e7eb",
    "text.color": INK,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
}


class _Note(NamedTuple):
    """A text above the bar of `device`, with its middle at `middle`, in bars from the first one."""

    device: int
    middle: float
    text: str


class _Words(NamedTuple):
    """Text in the panel of one wrapper: above it, below its bars, and above its bars."""

    title: str
    devices: tuple[str, ...]
    notes: tuple[_Note, ...]


FOUR_DEVICES = {
    "DataParallel": _Words(
        "DataParallel: one process",
        ("device 0", "1", "2", "3"),
        (
            _Note(0, 1.25, "device 0 also has the optimizer\nand sums all gradients"),
            _Note(1, 2.0, "a copy of the network,\na shard of the batch"),
        ),
    ),
    DDP: _Words(
        "DDP: four processes",
        ("rank 0", "1", "2", "3"),
        (_Note(0, 1.5, "each has a network, an optimizer,\nand buckets for its gradients"),),
    ),
}


class MissingResults(LookupError):
    """Results that a plot shows have not been measured."""


def draw(report: dict, folder: Path) -> tuple[list[str], list[str]]:
    """Write every plot that the results are enough for. Returns the names of the files, and a line for each other.

    MissingResults is raised if a plot cannot be drawn although the report calls itself complete.
    """
    import matplotlib

    drawn, missing = [], []
    for plot in (throughput, memory, four_devices, overhead):
        path = folder / f"{plot.__name__}.png"
        path.unlink(missing_ok=True)
        if plot is overhead and "overhead" not in report:  # only a full comparison measures it
            continue
        try:
            with matplotlib.rc_context(STYLE):
                plot(report, path)
            drawn.append(path.name)
        except MissingResults as error:
            if report["complete"]:
                raise
            missing.append(f"{path.name} was not drawn: {error}")
    return drawn, missing


def throughput(report: dict, path: Path) -> None:
    """Images per second of each level: the median of the rounds, their quartiles, and every round."""
    groups = [group for group in report.get("throughput") or [] if group["rows"]]
    if not groups:
        raise MissingResults("the levels have not been timed")
    most_rows = max(len(shown_rows(group)) for group in groups)
    height_of_a_panel = 0.42 * most_rows + 0.9
    figure, panels = subplots(len(groups), 1, 1.5 + height_of_a_panel * len(groups))
    top = 0.0
    for group in groups:
        for row in group["rows"].values():
            top = max(top, *row["samples"])
    for panel, group in zip(panels, groups, strict=True):
        ratios = {pair["of"]: pair["median"] for pair in group["pairs"] if pair["to"] == FIRST}
        shown = shown_rows(group)
        for y, (name, row) in enumerate(shown.items()):
            colour = BLUE if name in ratios else GREY
            if row.get("apart"):
                colour = SKY
            panel.barh(y, row["median"], 0.62, color=colour, alpha=0.85)
            whiskers = [[row["median"] - row["low"]], [row["high"] - row["median"]]]
            panel.errorbar(row["median"], y, xerr=whiskers, color=INK, capsize=4, linewidth=1.4)
            panel.plot(row["samples"], [y] * len(row["samples"]), "o", color=INK, markersize=3.2, alpha=0.45)
            beside = f"{row['median']:.0f}"
            if name in ratios:
                beside += f"   × {ratios[name]:.2f}"
            if row["noisy"]:
                beside += "  noisy"
            panel.text(max(row["samples"]) + 0.02 * top, y, beside, va="center", bbox=CLEAR)
        panel.set_yticks(range(len(shown)), _labels(shown))
        panel.invert_yaxis()
        panel.set_xlim(0, 1.27 * top)
        panel.grid(axis="x")
        panel.tick_params(axis="y", length=0)
        panel.set_title(f"Throughput, {group['group']}")
        devices = max(row.get("workers", 1) for row in shown.values())
        if has_equal_devices(group) and FIRST in shown and devices > 1:
            ideal = devices * shown[FIRST]["median"]
            panel.axvline(ideal, color=VERMILION, linestyle="--", linewidth=1.4)
            top = max(top, 1.02 * ideal)
            panel.set_xlim(0, 1.27 * top)
    panels[-1].set_xlabel("images per second")
    told = f"Measured: medians of {groups[0]['rounds']} rounds in turn, quartiles, and every round as a dot"
    sentences = [f"{told}; × paired ratio to level 00", *_about_devices(groups[0]), *_notes(groups)]
    save(figure, path, ". ".join(sentences), report["machine"])


def _labels(rows: dict[str, dict]) -> list[str]:
    """The rows' names; that of level 00 says that it has one device, where others have several."""
    labels = []
    for name, row in rows.items():
        on_one = name == FIRST and row.get("cores_per_device")
        labels.append(f"{name}, 1 device" if on_one else name)
    return labels


def _about_devices(group: dict) -> list[str]:
    """Sentences on devices that are made of cores, and on the dashed line, without full stops."""
    rows = group["rows"]
    lines = [line.removesuffix(".") for line in of_devices(rows)]
    devices = max(row.get("workers", 1) for row in rows.values())
    if has_equal_devices(group) and devices > 1:
        lines.append(f"Dashed: {devices} times one device")
    return lines


def _notes(groups: list[dict]) -> list[str]:
    """Notes of the groups on their rows, without full stops."""
    found = []
    for group in groups:
        for note in group["notes"]:
            found.append(f"At {group['group']}, {note.removesuffix('.')}")
    return found


def memory(report: dict, path: Path) -> None:
    """Peak memory of every device under DataParallel and under DDP, stacked by what it holds."""
    recorded = report.get("memory") or []
    rows = [row for row in recorded if row["devices"] > 1 and row["wrapper"] in WRAPPERS]
    if not rows:
        raise MissingResults("memory on 2, 4 and 8 devices has not been accounted for")
    titles = {row["network"]: f"{row['title']}, global batch {row['global_batch_size']}" for row in rows}
    counts = sorted({row["devices"] for row in rows})
    height = 1.85 + 2.7 * len(titles)
    widths = [count + 2.5 for count in counts]
    figure, panels = subplots(len(titles), len(counts), height, widths)
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
    handles = [swatch(COLOURS[name]) for name in CATEGORIES]
    figure.legend(handles, CATEGORIES, loc="upper center", ncols=3, columnspacing=1.2, handlelength=1.1)
    if any(row["allocated"] for row in rows):
        source = "Bars: simulated, every tensor charged to its device; diamonds: measured by CUDA's allocator"
    else:
        source = "Simulated: every tensor charged to its device"
    told = f"{source}. {_evenness(rows)}. DP: DataParallel; ratio: fullest / emptiest device"
    save(figure, path, told, report["machine"], top=0.58)


def _evenness(rows: list[dict]) -> str:
    """The sentence that all panels together say: how uneven each wrapper's devices are."""
    parts = []
    for wrapper in WRAPPERS:
        spreads = [spread(totals(row)) for row in rows if row["wrapper"] == wrapper]
        least, most = min(spreads), max(spreads)
        times = f"{most:.2f}" if f"{least:.2f}" == f"{most:.2f}" else f"{least:.2f} to {most:.2f}"
        parts.append(f"under {wrapper} {times} times")
    return f"The fullest device holds {' and '.join(parts)} what the emptiest holds"


def _devices(panel, row: dict, top: float) -> None:
    """The bars of one wrapper's devices: DataParallel's left, DDP's right."""
    n = row["devices"]
    start = 0 if row["wrapper"] == "DataParallel" else n + 1
    for device, split in enumerate(row["peaks"]):
        _stack(panel, start + device, split)
    if row["allocated"]:
        panel.plot(range(start, start + n), [size / 2**20 for size in row["allocated"]], "D", color=INK, markersize=4)
    middle = start + (n - 1) / 2
    above = max(_heights(row)) + 0.03 * top
    uneven = spread(totals(row))
    panel.text(middle, above, f"ratio\n{uneven:.2f}", ha="center", va="bottom", fontsize=SMALL, bbox=CLEAR)


def _stack(panel, position: float, split: dict[str, int]) -> None:
    """The bar of one device, made of what it holds."""
    below = 0.0
    for name in CATEGORIES:
        size = in_category(split, name) / 2**20
        panel.bar(position, size, 0.86, below, color=COLOURS[name])
        below += size


def four_devices(report: dict, path: Path) -> None:
    """A plot of each of four devices' memory in BasicNet's training, under DataParallel and under DDP."""
    rows = {
        row["wrapper"]: row
        for row in report.get("memory") or []
        if row["network"] == "basic_net" and row["devices"] == 4 and row["wrapper"] in WRAPPERS
    }
    if not rows:
        raise MissingResults("memory on 4 devices has not been accounted for")
    top = max(max(_heights(row)) for row in rows.values())
    figure, panels = subplots(1, len(FOUR_DEVICES), 4.8)
    for panel, (wrapper, words) in zip(panels, FOUR_DEVICES.items(), strict=True):
        peaks = rows[wrapper]["peaks"]
        for device, split in enumerate(peaks):
            _stack(panel, device, split)
        for note in words.notes:
            height = sum(peaks[note.device].values()) / 2**20 + 0.02 * top
            panel.text(note.middle, height, note.text, ha="center", va="bottom", fontsize=SMALL, bbox=CLEAR)
        panel.set_title(words.title)
        panel.set_xticks(range(len(peaks)), words.devices)
        panel.set(xlim=(-0.6, 3.6), ylim=(0, 1.25 * top))
        panel.grid(axis="y")
        panel.tick_params(axis="x", length=0)
    panels[0].set_ylabel("peak MiB")
    panels[1].tick_params(axis="y", labelleft=False)
    handles = [swatch(COLOURS[name]) for name in CATEGORIES]
    figure.legend(handles, CATEGORIES, loc="upper center", ncols=3, columnspacing=1.2, handlelength=1.1)
    told = "Simulated: every tensor charged to its device. BasicNet, global batch 64. Each device at its own peak"
    if all(_is_in_the_step(split) for split in rows[DDP]["peaks"]):
        told += "; under DDP it lies in the optimizer's step, when the activations are gone"
    save(figure, path, told, report["machine"], top=0.58)


def _is_in_the_step(split: dict[str, int]) -> bool:
    """Does a device reach this peak when backward has freed the activations?"""
    return in_category(split, "activations") < 0.01 * sum(split.values())


def _heights(row: dict) -> list[float]:
    sizes = [sum(split.values()) for split in row["peaks"]] + (row["allocated"] or [])
    return [size / 2**20 for size in sizes]


def overhead(report: dict, path: Path) -> None:
    """A plot of each abstraction's µs beyond the raw loop's step: medians of paired differences, with quartiles.

    Each raw loop has a panel, with those that are compared with it.
    """
    from matplotlib.transforms import blended_transform_factory

    groups = [group for group in report.get("overhead") or [] if group["pairs"]]
    if not groups:
        raise MissingResults("the overhead of a step has not been measured")
    pairs = groups[0]["pairs"]
    loops = list(dict.fromkeys(pair["to"] for pair in pairs))
    by_loop = [[pair for pair in pairs if pair["to"] == loop] for loop in loops]
    heights = [0.35 + 0.42 * len(own) for own in by_loop]
    figure, panels = subplots(len(loops), 1, 1.35 + sum(heights), None, heights)
    top = max(max(pair["high"] for pair in pairs), 1)
    lowest = min(pair["low"] for pair in pairs)
    for panel, loop, own in zip(panels, loops, by_loop, strict=True):
        _differences(panel, own, top)
        panel.set_xlim(min(0, 1.1 * lowest), 1.2 * top)
        # To the left of the panel too: the name of a loop is longer than the panel is wide.
        title = f"Added to a {loop}, whose step takes {groups[0]['rows'][loop]['median']:.0f} µs"
        panel.set_title(" ")
        blend = blended_transform_factory(figure.transFigure, panel.transAxes)
        panel.text(0.012, 1.03, title, transform=blend, weight="bold", in_layout=False)
    panels[-1].set_xlabel("µs added to a step")
    if any(not pair["of"].startswith("common.") for pair in pairs):
        handles = [swatch(BLUE), swatch(ORANGE)]
        figure.legend(handles, ["this repository", "other libraries"], loc="upper center", ncols=2, handlelength=1.1)
    told = f"Measured on one thread: medians of {groups[0]['rounds']} paired rounds, and quartiles"
    save(figure, path, told, report["machine"], top=0.36)


def _differences(panel, pairs: list[dict], top: float) -> None:
    """A bar for each pair, and beside it its median."""
    for y, pair in enumerate(pairs):
        colour = BLUE if pair["of"].startswith("common.") else ORANGE
        whiskers = [[pair["median"] - pair["low"]], [pair["high"] - pair["median"]]]
        panel.barh(y, pair["median"], 0.62, color=colour, alpha=0.85)
        panel.errorbar(pair["median"], y, xerr=whiskers, color=INK, capsize=4, linewidth=1.4)
        panel.text(max(pair["high"], 0) + 0.02 * top, y, f"{pair['median']:.0f} µs", va="center", bbox=CLEAR)
    panel.set_yticks(range(len(pairs)), [pair["of"] for pair in pairs])
    panel.invert_yaxis()
    panel.grid(axis="x")
    panel.tick_params(axis="y", length=0)


def place(machine: dict) -> str:
    """The machine that the numbers come from: 'x86_64, 2 CPU cores, no GPU, torch 2.11.0'."""
    gpus = f"{len(machine['gpus'])} × {machine['gpus'][0]}" if machine["gpus"] else "no GPU"
    return f"{machine['processor']}, {machine['cores']} CPU cores, {gpus}, torch {machine['torch']}"


def subplots(
    rows: int,
    columns: int,
    height: float,
    width_ratios: list[float] | None = None,
    height_ratios: list[float] | None = None,
):
    """A figure `height` inches high and as wide as all are, and its panels, row by row."""
    from matplotlib.figure import Figure  # not pyplot: no window, no state

    figure = Figure((WIDTH, height), dpi=DPI, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, width_ratios=width_ratios, height_ratios=height_ratios)
    return figure, list(panels.flat)


def swatch(colour: str):
    """A legend's patch of one colour."""
    from matplotlib.patches import Patch

    return Patch(color=colour)


def save(figure, path: Path, told: str, machine: dict, top: float = 0.0) -> None:
    """Write the figure, complete or not at all, with `told` and the machine below it; `top` inches stay free above."""
    height, lines = figure.get_figheight(), textwrap.wrap(f"{told}. {place(machine)}.", 81)
    bottom = 0.225 * len(lines) + 0.1
    figure.text(0.012, 0.06 / height, "\n".join(lines), fontsize=SMALL, color=SOFT, va="bottom", linespacing=1.3)
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08, rect=(0, bottom / height, 1, 1 - (bottom + top) / height))
    with atomic_write(path) as draft:
        figure.savefig(draft, format="png")
