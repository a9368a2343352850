"""The picture of `benchmarks.suites.network`: two nodes over each link against one, drawn from its record alone."""

from pathlib import Path

from benchmarks.report.plots import VERMILION, Bar, draw_bars, save, subplots


def draw_network(record: dict, path: Path) -> None:
    (group,) = record["groups"]
    batches = sorted({row["batch_per_process"] for row in group["rows"].values()})
    figure, panels = subplots(len(batches), 1, 1.2 + 2.4 * len(batches))
    for panel, batch in zip(panels, batches, strict=True):
        _panel(panel, group, batch)
    panels[-1].set_xlabel("images per second, both nodes")
    caption = f"Measured: medians of {group['rounds']} rounds in turn, and quartiles; × paired ratio to one node"
    save(figure, path, f"{caption}. Dashed: twice one node", record["machine"])


def _panel(panel, group: dict, batch: int) -> None:
    pairs = {pair["of"]: pair for pair in group["pairs"]}
    bars = []
    for name, row in group["rows"].items():
        if row["batch_per_process"] != batch:
            continue
        if row["nodes"] == 1:
            alone = row["median"]
        else:
            text = f"{row['median']:.0f}   × {pairs[name]['median']:.2f}"
            bars.append(Bar(label=row["link"], length=row["median"], low=row["low"], high=row["high"], text=text))
    draw_bars(panel, bars, 0.04 * alone)
    panel.axvline(2 * alone, color=VERMILION, linestyle="--", linewidth=1.4)
    panel.set_xlim(0, 2.8 * alone)
    panel.set_title(f"DDP on two nodes, {batch} images for each process")
