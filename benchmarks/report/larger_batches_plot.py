"""The plot of `benchmarks.suites.larger_batches`, drawn from its record alone."""

from pathlib import Path

from benchmarks.report.plots import BLUE, GREEN, INK, ORANGE, SMALL, VERMILION, save, subplots

MARKS = ("o", "s", "^", "D")
COLOURS = (BLUE, ORANGE, VERMILION, GREEN)
BESIDE = 0.12  # of the distance between two batches: so far apart are the marks of two rules


def picture(record: dict, path: Path) -> None:
    """A panel for each optimizer and rate, and in it a line for each rule."""
    groups = record["groups"]
    figure, panels = subplots(1, len(groups), 4.9)
    explained = set()
    for panel, group in zip(panels, groups, strict=True):
        _panel(panel, group)
        if group["optimizer"] not in explained:
            panel.legend(loc="upper left", fontsize=SMALL)
            explained.add(group["optimizer"])
    panels[0].set_ylabel("test loss after one epoch")
    for panel in panels[1:]:
        panel.tick_params(axis="y", labelleft=False)
    seeds = groups[0]["rounds"]
    told = (
        f"Measured: medians of {seeds} seeds, and every seed as a mark. k ranks bring 64 images each; in the title the "
        "rate of one rank, which each line multiplies. A small network, the same "
        f"{groups[0]['training_samples']:,} images in every training; 2.3 is the loss of guessing"
    )
    save(figure, path, told, record["machine"])


def _panel(panel, group: dict) -> None:
    """A line for each rule from one rank to all, over the batches, with the loss on a logarithmic axis."""
    first, *others = group["rows"].values()
    batches = sorted({row["ranks"] for row in others})
    rules = list(dict.fromkeys(row["rule"] for row in others))
    for number, rule in enumerate(rules):
        rows = [first, *(row for row in others if row["rule"] == rule)]
        shift = BESIDE * (number - (len(rules) - 1) / 2)
        medians = [row["median"] for row in rows]
        positions = [0.0, *(batches.index(row["ranks"]) + 1 + shift for row in rows[1:])]
        panel.plot(positions, medians, color=COLOURS[number], linewidth=1.8, label=rule)
        for position, row in zip(positions[1:], rows[1:], strict=True):
            seeds = row["samples"]
            panel.plot([position] * len(seeds), seeds, MARKS[number], color=COLOURS[number], markersize=4, alpha=0.6)
    panel.plot([0] * len(first["samples"]), first["samples"], "o", color=INK, markersize=4, alpha=0.6)
    panel.axhline(first["median"], color=INK, linewidth=0.8, linestyle=":")
    panel.set_yscale("log")
    panel.set_ylim(0.045, 3)
    panel.set_yticks([0.05, 0.1, 0.2, 0.5, 1, 2], ["0.05", "0.1", "0.2", "0.5", "1", "2"])
    panel.minorticks_off()
    panel.set_xticks(range(1 + len(batches)), [1, *batches])
    panel.set_xlabel("k")
    panel.set_title(f"{group['optimizer']}, {group['rate']:g}")
    panel.grid(axis="y")
