"""The lanes of `benchmarks.suites.timeline` and `one_step` as pictures, drawn from their records alone."""

from itertools import chain
from pathlib import Path

from benchmarks.harness.lanes.spans import (
    ALL_REDUCE,
    BACKWARD,
    COMPUTING_LANE,
    COPIES,
    FORWARD,
    OPTIMIZER,
    SENDING,
    WAITING,
    Span,
    count_backwards,
    hidden_share,
)
from benchmarks.harness.records import Group, read_group
from benchmarks.report.plots import BLUE, GREEN, ORANGE, PALE, PURPLE, SKY, legend, save, subplots

COLOURS = {
    COPIES: PURPLE,
    FORWARD: SKY,
    BACKWARD: BLUE,
    ALL_REDUCE: ORANGE,
    SENDING: ORANGE,
    OPTIMIZER: GREEN,
    WAITING: PALE,
}
INCHES_OF_A_RANK = 0.38
TITLE_INCHES = 0.42  # of a panel
AROUND_INCHES = 1.15  # legend, time axis and caption
# Shares of a rank's height. The rest is between the ranks.
COMPUTING = 0.5
SENT = 0.36  # all lanes that send, below the one that computes
IDLE = 0.16  # nothing is done there: a line, so that the eye is led to the rest

# The spans of each rank in one step.
RankSpans = list[list[Span]]


def draw_link(link: str, record: dict, path: Path) -> None:
    """The step over one link: a panel for each wrapper, all on one scale of time."""
    for group in map(read_group, record["groups"]):
        if group.facts["link"] == link:
            panels = {}
            for wrapper, rank_spans in spans_of(group).items():
                title = _title(wrapper, rank_spans, group.rows[wrapper].summary.median)
                panels[title] = rank_spans
            caption = f"Two ranks over {link}, medians of {group.rounds} rounds"
            _draw_panels(panels, "rank", caption, record["machine"], path)


def draw_levels(record: dict, path: Path) -> None:
    """A step of each level that has a row: a panel for each, with a lane for each device, on one scale of time."""
    group = read_group(*record["groups"])
    panels = {}
    for name, rank_spans in spans_of(group).items():
        panels[f"{name}: {group.rows[name].summary.median:.0f} ms"] = rank_spans
    caption = f"Medians of {group.rounds} rounds: {group.title}"
    _draw_panels(panels, "device", caption, record["machine"], path)


def spans_of(group: Group) -> dict[str, RankSpans]:
    """The spans of each row's ranks, from the lists that JSON has made of them."""
    found = {}
    for row, rank_lists in group.facts["lanes"].items():
        found[row] = [[Span(*fields) for fields in spans] for spans in rank_lists]
    return found


def _title(wrapper: str, rank_spans: RankSpans, median: float) -> str:
    """The wrapper, the time of its step for each backward, and how much of its sending rank 0's backward hides."""
    spans = rank_spans[0]
    backwards = count_backwards(spans)
    times = f"{backwards} × " if backwards > 1 else ""
    all_reduces = sum(span.name == ALL_REDUCE for span in spans)
    return f"{wrapper}: {times}{median / backwards:.0f} ms, {all_reduces} all-reduces, {hidden_share(spans):.0%} hidden"


def _draw_panels(panels: dict[str, RankSpans], unit: str, caption: str, machine: dict, path: Path) -> None:
    """The panels by their titles, one below the other; `unit` is the name of what has lanes, rank or device."""
    ranks = [len(rank_spans) for rank_spans in panels.values()]
    inches = AROUND_INCHES + INCHES_OF_A_RANK * sum(ranks) + TITLE_INCHES * len(panels)
    figure, all_axes = subplots(len(panels), 1, inches, height_ratios=ranks)
    spans: list[Span] = []
    for axes, (title, rank_spans) in zip(all_axes, panels.items(), strict=True):
        axes.set_title(title)
        _draw_spans(axes, rank_spans, unit)
        spans += chain.from_iterable(rank_spans)
    for axes in all_axes:
        axes.set_xlim(0, 1.01 * max(span.end for span in spans))
    for axes in all_axes[:-1]:
        axes.tick_params(axis="x", labelbottom=False)
    all_axes[-1].set_xlabel("milliseconds since the step began")
    names = {span.name for span in spans}
    shown = {name: colour for name, colour in COLOURS.items() if name in names}
    legend(figure, shown, len(shown))
    save(figure, path, caption, machine, top=0.36)


def _draw_spans(axes, rank_spans: RankSpans, unit: str) -> None:
    """A bar for each span: those of rank 1 lie between 1 and 2, counted downwards."""
    for rank, spans in enumerate(rank_spans):
        senders = sorted({span.lane for span in spans} - {COMPUTING_LANE})
        for span in spans:
            top = rank
            height = COMPUTING
            if span.name == WAITING:
                top += (COMPUTING - IDLE) / 2
                height = IDLE
            if span.lane != COMPUTING_LANE:
                height = SENT / len(senders)
                top += COMPUTING + senders.index(span.lane) * height
            # The white edge separates messages that follow one another at once.
            style = {"color": COLOURS[span.name], "edgecolor": "white", "linewidth": 0.3}
            axes.broken_barh([(span.start, span.end - span.start)], (top, height), **style)
    ranks = range(len(rank_spans))
    axes.set_yticks([rank + COMPUTING / 2 for rank in ranks], [f"{unit} {rank}" for rank in ranks])
    axes.set_ylim(len(ranks), -0.1)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")
    axes.spines["left"].set_visible(False)
