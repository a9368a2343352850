"""The lanes of `benchmarks.suites.timeline` and `one_step` as pictures, drawn from their records alone."""

from itertools import chain
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness.spans import (
    ALL_REDUCE,
    BACKWARD,
    COPIES,
    FORWARD,
    MAIN,
    OPTIMIZER,
    SENDING,
    WAITING,
    Span,
    hidden_share,
    to_spans,
)
from benchmarks.report.plots import BLUE, GREEN, INK, ORANGE, PALE, PURPLE, SKY, legend, save, subplots

COLOURS = {
    COPIES: PURPLE,
    FORWARD: SKY,
    BACKWARD: BLUE,
    ALL_REDUCE: ORANGE,
    SENDING: ORANGE,
    OPTIMIZER: GREEN,
    WAITING: PALE,
}
HIGH = 0.86  # of a lane that computes; one unit is HEIGHT_OF_A_UNIT
LOW = 0.46  # of a lane that sends
BETWEEN = 0.08  # the lanes of a rank
GAP = 0.5  # between two ranks
HEIGHT_OF_A_UNIT = 0.22  # inches


# The spans of each rank, in milliseconds.
RankSpans = list[list[Span]]


class Row(NamedTuple):
    """The place of a lane in the drawing: `bottom` and `height` in units, counted downwards."""

    bottom: float
    height: float


def picture(link: str, record: dict, path: Path) -> None:
    """The step over one link: a panel for each way, all on one scale of time."""
    for group in record["groups"]:
        if group["link"] == link:
            ways = lanes_of(group)
            titles = {way: _title(way, rank_spans, group["rows"][way]["median"]) for way, rank_spans in ways.items()}
            caption = f"Two ranks over {link}, medians of {group['rounds']} rounds"
            _picture(ways, titles, "rank", caption, record["machine"], path)


def levels(record: dict, path: Path) -> None:
    """A step of each level that has a row: a panel for each, with a lane for each device, on one scale of time."""
    (group,) = record["groups"]
    rows = group["rows"]
    titles = {row: f"{row}: {rows[row]['median']:.0f} ms" for row in rows}
    caption = f"Medians of {group['rounds']} rounds: {group['group']}"
    _picture(lanes_of(group), titles, "device", caption, record["machine"], path)


def lanes_of(group: dict) -> dict[str, RankSpans]:
    """Of each way the spans of its ranks, from the lists that JSON has made of them."""
    return {way: [to_spans(spans) for spans in rank_spans] for way, rank_spans in group["lanes"].items()}


def _picture(
    ways: dict[str, RankSpans], titles: dict[str, str], unit: str, caption: str, machine: dict, path: Path
) -> None:
    heights = [_height(rank_spans) for rank_spans in ways.values()]
    inches = 1.15 + HEIGHT_OF_A_UNIT * sum(heights) + 0.42 * len(heights)
    figure, panels = subplots(len(ways), 1, inches, height_ratios=heights)
    spans: list[Span] = []
    for rank_spans in ways.values():
        spans += chain.from_iterable(rank_spans)
    end = max(span.end for span in spans)
    for panel, (way, rank_spans) in zip(panels, ways.items(), strict=True):
        _panel(panel, rank_spans, unit)
        panel.set_title(titles[way])
        panel.set_xlim(0, 1.01 * end)
    for panel in panels[:-1]:
        panel.tick_params(axis="x", labelbottom=False)
    panels[-1].set_xlabel("milliseconds since the step began")
    shown = {name: colour for name, colour in COLOURS.items() if any(span.name == name for span in spans)}
    legend(figure, shown, len(shown), labelcolor=INK)
    save(figure, path, caption, machine, top=0.36)


def _title(way: str, rank_spans: RankSpans, median: float) -> str:
    """The way, the time of its step for each backward, and how much of its sending rank 0's backward hides."""
    names = [span.name for span in rank_spans[0]]
    backwards = names.count(BACKWARD)
    times = f"{backwards} × " if backwards > 1 else ""
    hidden = hidden_share(rank_spans[0])
    return f"{way}: {times}{median / backwards:.0f} ms, {names.count(ALL_REDUCE)} all-reduces, {hidden:.0%} hidden"


def _rows(rank_spans: RankSpans) -> dict[tuple[int, str], Row]:
    """The places of each rank's lanes; those of gloo are lower ones."""
    rows = {}
    bottom = 0.0
    for rank, spans in enumerate(rank_spans):
        senders = {span.lane for span in spans} - {MAIN}
        for lane in (MAIN, *sorted(senders)):
            height = HIGH if lane == MAIN else LOW
            rows[rank, lane] = Row(bottom, height)
            bottom += height + BETWEEN
        bottom += GAP
    return rows


def _height(rank_spans: RankSpans) -> float:
    """Of all lanes of a panel, in units."""
    last = list(_rows(rank_spans).values())[-1]
    return last.bottom + last.height


def _panel(panel, rank_spans: RankSpans, unit: str) -> None:
    rows = _rows(rank_spans)
    for rank, spans in enumerate(rank_spans):
        for span in spans:
            row = rows[rank, span.lane]
            if span.name == WAITING:  # nothing is done there: a line, so that the eye is led to the rest
                row = Row(row.bottom + row.height / 3, row.height / 3)
            bar = [(span.start, span.end - span.start)]
            # The white edge separates messages that follow one another at once.
            panel.broken_barh(bar, row, color=COLOURS[span.name], edgecolor="white", linewidth=0.3)
    middles = [rows[rank, MAIN].bottom + HIGH / 2 for rank in range(len(rank_spans))]
    panel.set_yticks(middles, [f"{unit} {number}" for number in range(len(rank_spans))])
    panel.set_ylim(_height(rank_spans) + 0.1, -0.1)
    panel.tick_params(axis="y", length=0)
    panel.grid(axis="x")
    panel.spines["left"].set_visible(False)
