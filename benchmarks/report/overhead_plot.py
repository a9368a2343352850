"""The picture of `benchmarks.suites.overhead`, drawn from its record alone: µs beyond the raw loop's step."""

from pathlib import Path

from benchmarks.harness.records import read_group
from benchmarks.report.plots import BLUE, ORANGE, Bar, draw_bars, legend, save, subplots


def draw_overhead(record: dict, path: Path) -> None:
    """Medians of paired differences, with quartiles; each raw loop has a panel, with those compared with it."""
    group = read_group(*record["groups"])
    loops = dict.fromkeys(comparison.pair.to for comparison in group.comparisons)
    heights = [0.35 + 0.42 * len(group.compared_with(loop)) for loop in loops]
    figure, panels = subplots(len(loops), 1, 1.35 + sum(heights), height_ratios=heights)
    top = max(1, *(comparison.summary.high for comparison in group.comparisons))
    lowest = min(comparison.summary.low for comparison in group.comparisons)
    for panel, loop in zip(panels, loops, strict=True):
        bars = []
        for name, comparison in group.compared_with(loop).items():
            added = comparison.summary
            colour = BLUE if name.startswith("common.") else ORANGE  # a row bears the name of a package
            bars.append(Bar(name, added.median, added, f"{added.median:.0f} µs", colour))
        draw_bars(panel, bars, 0.02 * top)
        panel.set_xlim(min(0, 1.1 * lowest), 1.2 * top)
        # Aligned to the right, because it is longer than the panel is wide: it begins above the names of the bars.
        title = f"Added to a {loop}, whose step takes {group.rows[loop].summary.median:.0f} µs"
        panel.set_title(title, loc="right")
    panels[-1].set_xlabel("µs added to a step")
    legend(figure, {"this repository": BLUE, "other libraries": ORANGE}, 2, 2.0)
    caption = f"Measured on one thread: medians of {group.rounds} paired rounds, and quartiles"
    save(figure, path, caption, record["machine"], top=0.36)
