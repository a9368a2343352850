"""The pictures of throughput, drawn from records alone: images per second, and the speed-up by several devices."""

import textwrap
from pathlib import Path

from benchmarks.harness.records import Group, Row, read_group
from benchmarks.harness.rows import BASELINE
from benchmarks.report.cells import cores_of_devices
from benchmarks.report.plots import BLUE, DASHED, GREY, SKY, SMALL, SOFT, Bar, draw_bars, save, subplots

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
    groups = [read_group(group) for group in report["throughput"]]
    most_rows = max(len(group.rows) for group in groups)
    figure, panels = subplots(len(groups), 1, 1.5 + (SPEED_BAR_INCHES * most_rows + PANEL_INCHES) * len(groups))
    fastest = 0.0
    for group in groups:
        fastest = max(fastest, *(max(row.samples) for row in group.rows.values()))
    for panel, group in zip(panels, groups, strict=True):
        _speeds(panel, group, fastest)
    panels[-1].set_xlabel("images per second")
    caption = f"Measured: medians of {groups[0].rounds} rounds in turn, quartiles, and every round as a dot"
    save(figure, path, f"{caption}; × paired ratio to level 00. {_about_devices(groups[0])}", report["machine"])


def _speeds(panel, group: Group, fastest: float) -> None:
    speed_ups = group.compared_with(BASELINE)
    bars = []
    for name, row in group.rows.items():
        summary = row.summary
        text = f"{summary.median:.0f}"
        if name in speed_ups:
            text += f"   × {speed_ups[name].summary.median:.2f}"
        if summary.noisy:
            text += "  noisy"
        label = f"{BASELINE}, 1 device" if name == BASELINE else name
        bars.append(Bar(label, summary.median, summary, text, _colour(name, row), row.samples))
    draw_bars(panel, bars, 0.02 * fastest)
    panel.set_title(f"Throughput, {group.title}")
    right = fastest
    if _most_devices(group) > 1:
        ideal = _most_devices(group) * group.rows[BASELINE].summary.median
        panel.axvline(ideal, **DASHED)
        right = max(fastest, 1.02 * ideal)
    panel.set_xlim(0, ROOM_FOR_SPEEDS * right)


def draw_scaling(record: dict, path: Path) -> None:
    """The speed of several devices, or of all cores, as a multiple of level 00's on one: a panel for each group."""
    groups = [read_group(group) for group in record["groups"]]
    lines = len(groups) // SCALING_COLUMNS  # as many groups of weak scaling as of strong scaling
    most_rows = max(len(group.compared_with(BASELINE)) for group in groups)
    height = 0.9 + lines * (SCALING_BAR_INCHES * most_rows + PANEL_INCHES)
    figure, panels = subplots(lines, SCALING_COLUMNS, height)
    furthest = max(map(_most_devices, groups))  # an interval, or the dashed line
    for group in groups:
        furthest = max(furthest, *(speed_up.interval.high for speed_up in group.compared_with(BASELINE).values()))
    for panel, group in zip(panels, groups, strict=True):
        _speed_ups(panel, group, ROOM_FOR_RATIOS * furthest)
    caption = f"Measured: medians of {groups[0].rounds} paired ratios, intervals. “02 on 2”: level 02 on 2 devices"
    save(figure, path, f"{caption}. {_about_devices(groups[0])}", record["machine"])


def _speed_ups(panel, group: Group, right: float) -> None:
    bars = []
    for name, speed_up in group.compared_with(BASELINE).items():
        median = speed_up.summary.median
        row = group.rows[name]
        level = row.facts["level"][:2]
        label = f"{level}, all" if row.facts["all_cores"] else f"{level} on {row.facts['workers']}"
        bars.append(Bar(label, median, speed_up.interval, f"{median:.2f}", _colour(name, row)))
    draw_bars(panel, bars, 0.03 * right)
    panel.axvline(1, color=SOFT, linewidth=1.2)
    panel.axvline(_most_devices(group), **DASHED)
    panel.set_xlim(0, right)
    panel.set_xlabel("times level 00 on one device")
    panel.set_ylabel("level")
    panel.set_title(textwrap.fill(group.title, TITLE_CHARACTERS), fontsize=SMALL)


def _colour(name: str, row: Row) -> str:
    if name == BASELINE:
        return GREY
    return SKY if row.facts["all_cores"] else BLUE


def _most_devices(group: Group) -> int:
    return max(row.facts["workers"] for row in group.rows.values())


def _about_devices(group: Group) -> str:
    """The cores of a device, where devices are made of cores, and the dashed line."""
    cores = cores_of_devices(group.rows.values())
    dashed = f"Dashed: {_most_devices(group)} times one device"
    return f"A device has {cores}, and as many threads. {dashed}" if cores else dashed
