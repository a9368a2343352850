"""The lanes of `benchmarks.suites.timeline` as pictures, drawn from its record alone."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness.lanes import MAIN
from benchmarks.harness.spans import ALL_REDUCE, BACKWARD, FORWARD, OPTIMIZER, WAITING, Span, hidden_share
from benchmarks.report.plots import BLUE, GREEN, INK, ORANGE, PALE, SKY, STYLE, save, subplots

COLOURS = {FORWARD: SKY, BACKWARD: BLUE, ALL_REDUCE: ORANGE, OPTIMIZER: GREEN, WAITING: PALE}
HIGH = 0.86  # of a lane that computes; one unit is HEIGHT_OF_A_UNIT
LOW = 0.46  # of a lane that sends
BETWEEN = 0.08  # the lanes of a rank
GAP = 0.5  # between two ranks
HEIGHT_OF_A_UNIT = 0.22  # inches


# The spans of each rank, in milliseconds.
OfRanks = list[list[Span]]


class Row(NamedTuple):
    """The place of a lane in the drawing: `bottom` and `height` in units, counted downwards."""

    bottom: float
    height: float


def draw(groups: list[dict], machine: dict, folder: Path) -> list[str]:
    """Write a picture for each group into `folder`; returns their names.

    Args:
        groups: of `benchmarks.suites.timeline`. KeyError is raised if something in one is missing.
        machine: of `benchmarks.harness.records.machine`.
    """
    import matplotlib

    names = []
    for group in groups:
        stem = f"timeline-{file_name(group['link'])}"
        with matplotlib.rc_context(STYLE):
            _picture(group, machine, folder / f"{stem}.png")
        names.append(f"{stem}.png")
    return names


def file_name(link: str) -> str:
    """'1 Gbit/s' as '1-gbit'."""
    return re.sub(r"\W+", "-", link.lower().removesuffix("/s"))


def lanes_of(group: dict) -> dict[str, OfRanks]:
    """Of each way the spans of its ranks, from the lists that JSON has made of them."""
    lanes: dict[str, OfRanks] = {}
    for way, of_ranks in group["lanes"].items():
        lanes[way] = []
        for spans in of_ranks:
            lanes[way].append([Span(*span) for span in spans])
    return lanes


def _all_spans(lanes: dict[str, OfRanks]) -> Iterator[Span]:
    for of_ranks in lanes.values():
        for spans in of_ranks:
            yield from spans


def _picture(group: dict, machine: dict, path: Path) -> None:
    """One panel for each way, all on one scale of time."""
    ways = lanes_of(group)
    heights = [_height(of_ranks) for of_ranks in ways.values()]
    inches = 1.7 + HEIGHT_OF_A_UNIT * sum(heights) + 0.42 * len(heights)
    figure, panels = subplots(len(ways), 1, inches, height_ratios=heights)
    end = max(span.end for span in _all_spans(ways))
    for panel, (way, of_ranks) in zip(panels, ways.items(), strict=True):
        _panel(panel, of_ranks)
        panel.set_title(_title(way, of_ranks, group["rows"][way]["median"]))
        panel.set_xlim(0, 1.01 * end)
    for panel in panels[:-1]:
        panel.tick_params(axis="x", labelbottom=False)
    panels[-1].set_xlabel("milliseconds since the step began")
    _legend(figure, ways)
    steps = next(iter(group["rows"].values()))["samples"]
    source = f"Titles: medians of {len(steps)} rounds. Lanes: of each way the step nearest to its median, so they "
    source += f"may end earlier or later. {_what_lanes_are(group['link'])}"
    if any(sum(span.name == BACKWARD for span in of_ranks[0]) > 1 for of_ranks in ways.values()):
        source += ". 2 ×: two backwards in a step, that is twice the images"
    save(figure, path, source, machine, top=0.36)


def _title(way: str, of_ranks: OfRanks, median: float) -> str:
    """The way, the time of its step for each backward, and how much of its sending rank 0's backward hides."""
    spans = of_ranks[0]
    backwards = sum(span.name == BACKWARD for span in spans)
    title = f"{way}: {median:.0f} ms"
    if backwards > 1:
        title = f"{way}: {backwards} × {median / backwards:.0f} ms"
    messages = sum(span.name == ALL_REDUCE for span in spans)
    if messages:
        title += f", {messages} all-reduces, {hidden_share(spans):.0%} hidden"
    return title


def _what_lanes_are(link: str) -> str:
    lanes = f"Two ranks over {link}: above the thread that computes, below gloo's two threads"
    return f"{lanes}. Hidden: the share of rank 0's all-reduces that lies within backward"


def _rows(of_ranks: OfRanks) -> dict[tuple[int, str], Row]:
    """The places of each rank's lanes; those of gloo are lower ones."""
    rows = {}
    bottom = 0.0
    for rank, spans in enumerate(of_ranks):
        lanes = {span.lane for span in spans}
        for lane in sorted(lanes, key=lambda lane: (lane != MAIN, lane)):
            height = LOW if lane.startswith("gloo") else HIGH
            rows[rank, lane] = Row(bottom, height)
            bottom += height + BETWEEN
        bottom += GAP
    return rows


def _height(of_ranks: OfRanks) -> float:
    """Of all lanes of a panel, in units."""
    last = list(_rows(of_ranks).values())[-1]
    return last.bottom + last.height


def _panel(panel, of_ranks: OfRanks) -> None:
    rows = _rows(of_ranks)
    for rank, spans in enumerate(of_ranks):
        for span in spans:
            row = rows[rank, span.lane]
            bar = [(span.start, span.end - span.start)]
            if span.name == WAITING:  # nothing is done there: a line, so that the eye is led to the rest
                row = Row(row.bottom + row.height / 3, row.height / 3)
            # The white edge separates messages that follow one another at once.
            panel.broken_barh(bar, row, color=COLOURS[span.name], edgecolor="white", linewidth=0.3)
    labels = {}
    for (rank, lane), row in rows.items():
        if lane == MAIN:
            labels[row.bottom + row.height / 2] = f"rank {rank}"
    panel.set_yticks(list(labels), list(labels.values()))
    panel.set_ylim(_height(of_ranks) + 0.1, -0.1)
    panel.tick_params(axis="y", length=0)
    panel.grid(axis="x")
    panel.spines["left"].set_visible(False)


def _legend(figure, lanes: dict[str, OfRanks]) -> None:
    from matplotlib.patches import Patch

    names = {span.name for span in _all_spans(lanes)}
    shown = [name for name in COLOURS if name in names]
    handles = [Patch(color=COLOURS[name]) for name in shown]
    figure.legend(
        handles,
        shown,
        loc="upper center",
        ncols=len(shown),
        columnspacing=1.2,
        handlelength=1.1,
        labelcolor=INK,
    )
