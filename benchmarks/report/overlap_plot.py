"""The plot of `benchmarks.suites.overlap`, drawn from its record alone, and whether the timeline has seen the same."""

from pathlib import Path
from typing import NamedTuple

from benchmarks.harness.gradient_averaging import ALONE_TWICE, BATCH, baseline
from benchmarks.report.plots import BLUE, CLEAR, GREY, INK, ORANGE, STYLE, save, subplots
from benchmarks.suites.overlap import added

NAME = "overlap.png"
FREE = 0.48  # of the width, right of the longest bar, for what is written beside the bars
HEIGHT_OF_A_ROW = 0.26  # inches


def draw(groups: list[dict], machine: dict, folder: Path) -> list[str]:
    """Write overlap.png into `folder`, in place of an older one; returns its name.

    Args:
        groups: one for each link, of `benchmarks.suites.overlap.record`. KeyError is raised if something is missing.
        machine: of `benchmarks.harness.records.machine`.
    """
    import matplotlib

    (folder / NAME).unlink(missing_ok=True)
    with matplotlib.rc_context(STYLE):
        _picture(groups, machine, folder / NAME)
    return [NAME]


def _picture(groups: list[dict], machine: dict, path: Path) -> None:
    rows = max(len(_shown(group)) for group in groups)
    height_of_a_panel = 0.55 + HEIGHT_OF_A_ROW * rows
    figure, panels = subplots(len(groups), 1, 1.6 + height_of_a_panel * len(groups))
    for panel, group in zip(panels, groups, strict=True):
        _panel(panel, group)
    panels[-1].set_xlabel("milliseconds of a step for each backward")
    _legend(figure)
    rounds = groups[0]["rounds"]
    source = f"Measured: medians of {rounds} rounds in turn, and quartiles; {BATCH} images a rank and backward"
    if any(row["noisy"] for group in groups for row in group["rows"].values()):
        source += ". * noisy: a spread over 15 %"
    sent = "MB: what a rank sent for it"
    drift = "Drift: distance of the weights from those of torch's DDP, as a share of how far these went"
    save(figure, path, f"{source}. {sent}. {drift}", machine, top=0.36)


def _panel(panel, group: dict) -> None:
    """A bar for each way: grey as long as the step that averages nothing, then what averaging adds to it."""
    bars = _shown(group)
    longest = max(bar.high for bar in bars)
    for y, bar in enumerate(bars):
        panel.barh(y, bar.computing, 0.72, color=GREY)
        panel.barh(y, max(0, bar.end - bar.computing), 0.72, bar.computing, color=bar.colour)
        whiskers = [[bar.end - bar.low], [bar.high - bar.end]]
        panel.errorbar(bar.end, y, xerr=whiskers, color=INK, capsize=2.5, linewidth=1.2)
        panel.text(bar.high + 0.02 * longest, y, bar.text, va="center", bbox=CLEAR)
    panel.set_yticks(range(len(bars)), [bar.way for bar in bars])
    panel.invert_yaxis()
    panel.set_xlim(0, (1 + FREE) * longest)
    panel.margins(y=0.01)
    panel.grid(axis="x")
    panel.tick_params(axis="y", length=0)
    panel.set_title(f"Averaging gradients over {group['link']}")


class Bar(NamedTuple):
    """The bar of one way, in milliseconds: the end of its grey part, its own end, and its quartiles."""

    way: str
    computing: float
    end: float
    low: float
    high: float
    colour: str
    text: str


def _shown(group: dict) -> list[Bar]:
    """All bars but that of two backwards without averaging: it is the grey part of `no_sync`'s bar."""
    return [bar for bar in _bars(group) if bar.way != ALONE_TWICE]


def _bars(group: dict) -> list[Bar]:
    rows = group["rows"]
    differences = added(group)
    bars = []
    for way, row in rows.items():
        if way in differences:
            computing = rows[baseline(way)]["median"]
            end, low, high = (computing + differences[way][name] for name in ("median", "low", "high"))
            text = _beside(row, differences[way])
        else:
            computing = row["median"]
            end, low, high = row["median"], row["low"], row["high"]
            text = f"{row['median']:.0f} ms"
        mark = " *" if row["noisy"] else ""
        bars.append(Bar(way, computing, end, low, high, ORANGE if row["compresses"] else BLUE, text + mark))
    return bars


def _beside(row: dict, difference: dict) -> str:
    """'+112 ms, 3.8 MB, drift 1.2%'."""
    text = f"{difference['median']:+.0f} ms, {row['bytes_per_backward'] / 1e6:.1f} MB"
    if row["compresses"]:
        text += f", drift {row['drift']:.1%}"
    return text


class Agreement(NamedTuple):
    """One way on one link, as the timeline and the suite measured it, in milliseconds a step."""

    link: str
    way: str
    in_lanes: float
    timed: float
    spread: float

    @property
    def holds(self) -> bool:
        """Do the two differ by no more than the quartiles' distances of both together?"""
        return abs(self.in_lanes - self.timed) <= self.spread

    def __str__(self) -> str:
        verdict = "within the spread" if self.holds else "NOT within the spread"
        values = f"{self.in_lanes:.0f} ms in the lanes, {self.timed:.0f} ms timed"
        return f"{self.way} over {self.link}: {values}, {verdict} of {self.spread:.0f} ms"


def agreements(timeline: list[dict], overlap: list[dict]) -> list[Agreement]:
    """Each way that both have recorded on the same link."""
    lanes = {group["link"]: group["rows"] for group in timeline}
    found = []
    for group in overlap:
        for way, row in group["rows"].items():
            recorded = lanes.get(group["link"], {}).get(way)
            if recorded:
                backwards = row["backwards_per_step"]
                spread = recorded["high"] - recorded["low"] + backwards * (row["high"] - row["low"])
                found.append(Agreement(group["link"], way, recorded["median"], backwards * row["median"], spread))
    return found


def _legend(figure) -> None:
    from matplotlib.patches import Patch

    entries = {"computing": GREY, "averaging adds": BLUE, "in a smaller format": ORANGE}
    handles = [Patch(color=colour) for colour in entries.values()]
    figure.legend(handles, list(entries), loc="upper center", ncols=len(entries), handlelength=1.1)
