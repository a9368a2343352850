"""The style of all pictures, and what several of them draw: bars with whiskers, a legend, the lines below."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.paired import Interval, Summary
from common.files import atomic_write

# Okabe and Ito's palette: told apart with any kind of colour vision. https://jfly.uni-koeln.de/color/
BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
SKY = "#56B4E9"
VERMILION = "#D55E00"
PURPLE = "#CC79A7"
GREY = "#B0B0B0"
PALE = "#D5DADF"
INK = "#1f2328"
SOFT = "#59636e"
DASHED = {"color": VERMILION, "linestyle": "--", "linewidth": 1.4}
CLEAR = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # It hides the grid behind a number.
# In inches and points. 12 points are 18 pixels in a README, and 8 on a phone, which shows a picture 360 pixels wide.
WIDTH = 7.2
SMALL = 11.6  # No text is smaller.
DPI = 220
CAPTION_CHARACTERS = 81
LINE_INCHES = 0.225  # of the caption
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


@dataclass(frozen=True)
class Bar:
    """A horizontal bar with whiskers from `ends.low` to `ends.high` and dots, and a text to the right of all these."""

    label: str
    length: float
    ends: Summary | Interval
    text: str
    colour: str = BLUE
    dots: Sequence[float] = ()


def draw_bars(panel, bars: list[Bar], gap: float) -> None:
    """Draw the bars from the top down, each text by `gap` to the right of what is drawn."""
    for y, bar in enumerate(bars):
        panel.barh(y, bar.length, 0.62, color=bar.colour, alpha=0.85)
        whiskers = [[bar.length - bar.ends.low], [bar.ends.high - bar.length]]
        panel.errorbar(bar.length, y, xerr=whiskers, color=INK, capsize=4, linewidth=1.4)
        panel.plot(bar.dots, [y] * len(bar.dots), "o", color=INK, markersize=3.2, alpha=0.45)
        end = max(0, bar.ends.high, *bar.dots)
        panel.text(end + gap, y, bar.text, va="center", bbox=CLEAR)
    panel.set_yticks(range(len(bars)), [bar.label for bar in bars])
    panel.invert_yaxis()
    panel.grid(axis="x")
    panel.tick_params(axis="y", length=0)


def legend(figure, colours: dict[str, str], columns: int, spacing: float = 1.2) -> None:
    """A legend above all panels, with a patch of its colour for each name."""
    from matplotlib.patches import Patch

    handles = [Patch(color=colour) for colour in colours.values()]
    place_above = {"loc": "upper center", "ncols": columns, "columnspacing": spacing, "handlelength": 1.1}
    figure.legend(handles, list(colours), **place_above)


def subplots(rows: int, columns: int, height: float, **ratios: list[float]):
    """A figure `height` inches high and as wide as all are, and its panels, row by row.

    `ratios` are the `width_ratios` and `height_ratios` of matplotlib's `Figure.subplots`.
    """
    from matplotlib.figure import Figure  # not pyplot: no window, no state

    figure = Figure((WIDTH, height), dpi=DPI, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, **ratios)
    return figure, list(panels.flat)


def save(figure, path: Path, caption: str, machine: dict, top: float = 0.0) -> None:
    """Write the figure, complete or not at all, with caption and machine below; `top` inches stay free above."""
    gpus = f"{len(machine['gpus'])} × {machine['gpus'][0]}" if machine["gpus"] else "no GPU"
    place = f"{machine['processor']}, {machine['cores']} CPU cores, {gpus}, torch {machine['torch']}"
    lines = textwrap.wrap(f"{caption}. {place}.", CAPTION_CHARACTERS)
    height = figure.get_figheight()
    bottom = LINE_INCHES * len(lines) + 0.1
    figure.text(0.012, 0.06 / height, "\n".join(lines), fontsize=SMALL, color=SOFT, va="bottom", linespacing=1.3)
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08, rect=(0, bottom / height, 1, 1 - (bottom + top) / height))
    with atomic_write(path) as draft:
        figure.savefig(draft, format="png")
