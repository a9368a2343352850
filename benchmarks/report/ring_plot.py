"""The picture of a ring all-reduce on level 02's page, from the numbers of four processes.

python -m benchmarks.report.ring_plot
"""

import argparse
from pathlib import Path

from benchmarks.report.plots import DPI, SOFT, STYLE, WIDTH
from common import ladder
from common.files import atomic_write
from common.ladder import ring

PICTURE = ladder.ROOT / "02_ddp_raw" / "ring.png"
CAME = "#ffd591"
EDGE = "#c46a00"  # of what has just come, also where it is complete
COMPLETE = "#a8e0cd"
EMPTY = "#f6f8fa"
BOX = 1.0  # the width of a part's box, the unit across; its height is the unit downwards
STATE = 1.72  # from a state to the next one
RANK = ring.RANKS + 0.9  # from the first box of a rank to that of the next
RIGHT = 6 * STATE + BOX + 0.1
BOTTOM = (ring.RANKS - 1) * RANK + ring.RANKS
HEADS = {0: "before", 1: "reduce-scatter: add", 4: "all-gather: keep"}


def draw(states: list[ring.State], path: Path) -> None:
    """Write the picture: a column for each state, four boxes for each rank, an arrow for each message."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    with matplotlib.rc_context(STYLE):
        figure = Figure((WIDTH, 6.2), dpi=DPI)
        panel = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        panel.set(xlim=(-1.45, RIGHT), ylim=(BOTTOM + 2.4, -1.6))
        panel.axis("off")
        for rank in range(ring.RANKS):
            panel.text(-1.35, rank * RANK + ring.RANKS / 2, f"rank {rank}", va="center", weight="bold")
        for column, head in HEADS.items():
            panel.text(column * STATE, -0.85, head, va="center", weight="bold")
        for column, state in enumerate(states):
            for rank in range(ring.RANKS):
                _boxes(panel, state, column, rank)
                if column:
                    _arrow(panel, state, column, rank)
        handles = [Patch(facecolor=CAME, edgecolor=EDGE, linewidth=2), Patch(facecolor=COMPLETE, edgecolor=SOFT)]
        labels = ["has just come", "summed over all four ranks"]
        panel.legend(handles, labels, loc="lower center", ncols=2, handlelength=1.1)
        with atomic_write(path) as draft:
            figure.savefig(draft, format="png")


def _boxes(panel, state: ring.State, column: int, rank: int) -> None:
    from matplotlib.patches import Rectangle

    for part, number in enumerate(state.numbers[rank]):
        has_come = bool(state.received) and state.received[rank] == part
        colour = EMPTY
        if number == ring.SUMS[part]:
            colour = COMPLETE
        elif has_come:
            colour = CAME
        corner = (column * STATE, rank * RANK + part)
        box = Rectangle(corner, BOX, 1, facecolor=colour, edgecolor=SOFT, linewidth=0.8)
        weight = "normal"
        if has_come:
            box.set(edgecolor=EDGE, linewidth=2, zorder=2)
            weight = "bold"
        panel.add_patch(box)
        panel.text(corner[0] + BOX / 2, corner[1] + 0.52, str(number), ha="center", va="center", weight=weight)


def _arrow(panel, state: ring.State, column: int, rank: int) -> None:
    """From the part that `rank` has sent to where it has come; the last rank's leaves below and comes back above."""
    part = state.sent[rank] + 0.5
    start = ((column - 1) * STATE + BOX, rank * RANK + part)
    end = (column * STATE, (rank + 1) * RANK + part)
    style = {"color": SOFT, "linewidth": 1.0, "shrinkA": 0, "shrinkB": 0}
    if rank == ring.RANKS - 1:
        slope = (end[0] - start[0]) / RANK
        edge = BOTTOM + 0.35
        below = (start[0] + slope * (edge - start[1]), edge)
        panel.annotate("", below, start, arrowprops=style | {"arrowstyle": "-"})
        top = -0.35
        end = (end[0], part)
        start = (end[0] - slope * (part - top), top)
    panel.annotate("", end, start, arrowprops=style | {"arrowstyle": "-|>"})


if __name__ == "__main__":
    argparse.ArgumentParser("python -m benchmarks.report.ring_plot", description=__doc__.splitlines()[0]).parse_args()
    draw(ring.trace(), PICTURE)
    print(f"Written: {PICTURE.relative_to(ladder.ROOT)}")
