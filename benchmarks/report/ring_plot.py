"""The picture of a ring all-reduce on level 02's page, from the numbers of four processes.

python -m benchmarks.report.ring_plot
"""

import argparse
from pathlib import Path

from benchmarks.report.plots import DPI, INK, SOFT, STYLE, WIDTH
from common import ladder
from common.files import atomic_write
from common.ladder import ring

PICTURE = ladder.ROOT / "02_ddp_raw" / "ring.png"
CAME = "#ffd591"
COMPLETE = "#a8e0cd"
EMPTY = "#f6f8fa"
BOX = 1.0  # the width of a part's box, the unit of the drawing
RANK = 4 * BOX + 0.6  # from the first box of a rank to that of the next
ROW = 1.75  # from a state to the next one
HALVES = {0: "before", 1: "reduce-\nscatter:\nadd", 4: "all-\ngather:\nkeep"}


def draw(states: list[ring.State], path: Path) -> None:
    """Write the picture: a column for each rank, a row for each state, an arrow for each message."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    with matplotlib.rc_context(STYLE):
        figure = Figure((WIDTH, 5.6), dpi=DPI)
        panel = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        panel.set(xlim=(-2.3, 4 * RANK - 0.3), ylim=(6 * ROW + 2.3, -1.7))
        panel.axis("off")
        for rank in range(ring.RANKS):
            panel.text(rank * RANK + 2 * BOX, -0.75, f"rank {rank}", ha="center", weight="bold")
        for row, label in HALVES.items():
            panel.text(-2.15, row * ROW + 0.5, label, va="center", fontsize=10.5, color=INK, linespacing=1.25)
        for row, state in enumerate(states):
            for rank in range(ring.RANKS):
                _boxes(panel, state, row, rank)
                if row:
                    _arrow(panel, state, row, rank)
        handles = [Patch(facecolor=CAME, edgecolor=SOFT), Patch(facecolor=COMPLETE, edgecolor=SOFT)]
        labels = ["has just come", "summed over all four ranks"]
        panel.legend(handles, labels, loc="lower center", ncols=2, handlelength=1.1, fontsize=11)
        with atomic_write(path) as draft:
            figure.savefig(draft, format="png")


def _boxes(panel, state: ring.State, row: int, rank: int) -> None:
    from matplotlib.patches import Rectangle

    for part, number in enumerate(state.numbers[rank]):
        has_come = bool(state.received) and state.received[rank] == part
        colour = EMPTY
        if number == ring.SUMS[part]:
            colour = COMPLETE
        elif has_come:
            colour = CAME
        corner = (rank * RANK + part * BOX, row * ROW)
        panel.add_patch(Rectangle(corner, BOX, 1, facecolor=colour, edgecolor=SOFT, linewidth=0.8))
        weight = "bold" if has_come else "normal"
        panel.text(
            corner[0] + 0.5, corner[1] + 0.52, str(number), ha="center", va="center", fontsize=8.4, weight=weight
        )


def _arrow(panel, state: ring.State, row: int, rank: int) -> None:
    """From the part that `rank` has sent to where it has come; the last rank's leaves on the right."""
    part = state.sent[rank]
    start = (rank * RANK + part + 0.5, (row - 1) * ROW + 1.0)
    end = ((rank + 1) * RANK + part + 0.5, row * ROW)
    style = {"arrowstyle": "-|>", "color": SOFT, "linewidth": 1.0, "shrinkA": 0, "shrinkB": 0}
    if rank < ring.RANKS - 1:
        panel.annotate("", end, start, arrowprops=style)
        return
    slope = (end[1] - start[1]) / RANK
    edge = 4 * RANK - 0.35
    left = -0.45
    panel.annotate("", (edge, start[1] + slope * (edge - start[0])), start, arrowprops=style | {"arrowstyle": "-"})
    home = part + 0.5
    panel.annotate("", (home, row * ROW), (left, row * ROW - slope * (home - left)), arrowprops=style)


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m benchmarks.report.ring_plot", description=__doc__.splitlines()[0]
    ).parse_args()
    draw(ring.trace(), PICTURE)
    print(f"Written: {PICTURE.relative_to(ladder.ROOT)}")


if __name__ == "__main__":
    main()
