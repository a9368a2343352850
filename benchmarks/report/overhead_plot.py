"""The picture of `benchmarks.suites.overhead`, drawn from its record alone: µs beyond the raw loop's step."""

from pathlib import Path

from benchmarks.report.plots import BLUE, ORANGE, Bar, draw_bars, legend, save, subplots


def draw_overhead(record: dict, path: Path) -> None:
    """Medians of paired differences, with quartiles; each raw loop has a panel, with those compared with it."""
    (group,) = record["groups"]
    pairs = group["pairs"]
    loops = list(dict.fromkeys(pair["to"] for pair in pairs))
    by_loop = [[pair for pair in pairs if pair["to"] == loop] for loop in loops]
    heights = [0.35 + 0.42 * len(compared) for compared in by_loop]
    figure, panels = subplots(len(loops), 1, 1.35 + sum(heights), height_ratios=heights)
    top = max(max(pair["high"] for pair in pairs), 1)
    lowest = min(pair["low"] for pair in pairs)
    for panel, loop, compared in zip(panels, loops, by_loop, strict=True):
        bars = []
        for pair in compared:
            colour = BLUE if pair["of"].startswith("common.") else ORANGE  # a row bears the name of a package
            bar = Bar(
                label=pair["of"],
                length=pair["median"],
                low=pair["low"],
                high=pair["high"],
                text=f"{pair['median']:.0f} µs",
                colour=colour,
            )
            bars.append(bar)
        draw_bars(panel, bars, 0.02 * top)
        panel.set_xlim(min(0, 1.1 * lowest), 1.2 * top)
        # Aligned to the right, because it is longer than the panel is wide: it begins above the names of the bars.
        title = f"Added to a {loop}, whose step takes {group['rows'][loop]['median']:.0f} µs"
        panel.set_title(title, loc="right")
    panels[-1].set_xlabel("µs added to a step")
    legend(figure, {"this repository": BLUE, "other libraries": ORANGE}, 2, 2.0)
    caption = f"Measured on one thread: medians of {group['rounds']} paired rounds, and quartiles"
    save(figure, path, caption, record["machine"], top=0.36)
