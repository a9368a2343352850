"""The pictures of throughput, drawn from records alone: images per second, and the speed-up by several devices."""

import textwrap
from pathlib import Path

from benchmarks.harness.rows import BASELINE
from benchmarks.report.cells import short_label, speed_ups
from benchmarks.report.plots import BLUE, GREY, SKY, SMALL, SOFT, VERMILION, Bar, draw_bars, save, subplots
from common.instruments.result import quantity

SCALING_COLUMNS = 2
TITLE_CHARACTERS = 28
SPEED_BAR_INCHES = 0.42
SCALING_BAR_INCHES = 0.4
PANEL_INCHES = 0.9  # title and axis of a panel
# The x axis ends at this multiple of the longest bar, interval or dashed line, which leaves room for the texts.
ROOM_FOR_SPEEDS = 1.27
ROOM_FOR_RATIOS = 1.3


def draw_speeds(report: dict, path: Path) -> None:
    """Images per second of each level: the median of the rounds, their quartiles, and every round."""
    groups = report["throughput"]
    most_rows = max(len(group["rows"]) for group in groups)
    figure, panels = subplots(len(groups), 1, 1.5 + (SPEED_BAR_INCHES * most_rows + PANEL_INCHES) * len(groups))
    fastest = 0.0
    for group in groups:
        fastest = max(fastest, *(max(row["samples"]) for row in group["rows"].values()))
    for panel, group in zip(panels, groups, strict=True):
        _speeds(panel, group, fastest)
    panels[-1].set_xlabel("images per second")
    caption = f"Measured: medians of {groups[0]['rounds']} rounds in turn, quartiles, and every round as a dot"
    save(figure, path, f"{caption}; × paired ratio to level 00. {_about_devices(groups[0])}", report["machine"])


def _speeds(panel, group: dict, fastest: float) -> None:
    rows = group["rows"]
    pairs = speed_ups(group)
    bars = []
    for name, row in rows.items():
        text = f"{row['median']:.0f}"
        if name in pairs:
            text += f"   × {pairs[name]['median']:.2f}"
        if row["noisy"]:
            text += "  noisy"
        bar = Bar(
            label=f"{BASELINE}, 1 device" if name == BASELINE else name,
            length=row["median"],
            low=row["low"],
            high=row["high"],
            text=text,
            colour=_colour(name, row),
            dots=row["samples"],
        )
        bars.append(bar)
    draw_bars(panel, bars, 0.02 * fastest)
    panel.set_title(f"Throughput, {group['group']}")
    right = fastest
    if _most_devices(group) > 1:
        ideal = _most_devices(group) * rows[BASELINE]["median"]
        panel.axvline(ideal, color=VERMILION, linestyle="--", linewidth=1.4)
        right = max(fastest, 1.02 * ideal)
    panel.set_xlim(0, ROOM_FOR_SPEEDS * right)


def draw_scaling(record: dict, path: Path) -> None:
    """The speed of several devices, or of all cores, as a multiple of level 00's on one: a panel for each group."""
    groups = record["groups"]
    lines = len(groups) // SCALING_COLUMNS  # as many groups of weak scaling as of strong scaling
    most_rows = max(len(speed_ups(group)) for group in groups)
    height = 0.9 + lines * (SCALING_BAR_INCHES * most_rows + PANEL_INCHES)
    figure, panels = subplots(lines, SCALING_COLUMNS, height)
    furthest = max(map(_most_devices, groups))  # an interval, or the dashed line
    for group in groups:
        furthest = max(furthest, *(pair["interval"][1] for pair in speed_ups(group).values()))
    for panel, group in zip(panels, groups, strict=True):
        _speed_ups(panel, group, ROOM_FOR_RATIOS * furthest)
    caption = f"Measured: medians of {groups[0]['rounds']} paired ratios, intervals. “02 on 2”: level 02 on 2 devices"
    save(figure, path, f"{caption}. {_about_devices(groups[0])}", record["machine"])


def _speed_ups(panel, group: dict, right: float) -> None:
    bars = []
    for name, pair in speed_ups(group).items():
        row = group["rows"][name]
        low, high = pair["interval"]
        ratio = pair["median"]
        bar = Bar(
            label=short_label(row), length=ratio, low=low, high=high, text=f"{ratio:.2f}", colour=_colour(name, row)
        )
        bars.append(bar)
    draw_bars(panel, bars, 0.03 * right)
    panel.axvline(1, color=SOFT, linewidth=1.2)
    panel.axvline(_most_devices(group), color=VERMILION, linestyle="--", linewidth=1.4)
    panel.set_xlim(0, right)
    panel.set_xlabel("times level 00 on one device")
    panel.set_ylabel("level")
    panel.set_title(textwrap.fill(group["group"], TITLE_CHARACTERS), fontsize=SMALL)


def _colour(name: str, row: dict) -> str:
    if name == BASELINE:
        return GREY
    return SKY if row["all_cores"] else BLUE


def _most_devices(group: dict) -> int:
    return max(row["workers"] for row in group["rows"].values())


def _about_devices(group: dict) -> str:
    """The cores of a device, where devices are made of cores, and the dashed line."""
    cores = {row["cores_per_device"] for row in group["rows"].values()} - {None}
    dashed = f"Dashed: {_most_devices(group)} times one device"
    if not cores:
        return dashed
    return f"A device has {quantity(min(cores), 'core')}, and as many threads. {dashed}"
