"""The picture of `benchmarks.suites.network`: two nodes over each link against one, drawn from its record alone."""

from pathlib import Path

from benchmarks.harness.records import Group, read_group
from benchmarks.report.plots import DASHED, Bar, draw_bars, save, subplots


def draw_network(record: dict, path: Path) -> None:
    group = read_group(*record["groups"])
    rows_of_one_node = [name for name, row in group.rows.items() if row.facts["nodes"] == 1]  # one of each batch
    figure, panels = subplots(len(rows_of_one_node), 1, 1.2 + 2.4 * len(rows_of_one_node))
    for panel, name in zip(panels, rows_of_one_node, strict=True):
        _panel(panel, group, name)
    panels[-1].set_xlabel("images per second, both nodes")
    caption = f"Measured: medians of {group.rounds} rounds in turn, and quartiles; × paired ratio to one node"
    save(figure, path, f"{caption}. Dashed: twice one node", record["machine"])


def _panel(panel, group: Group, one_node: str) -> None:
    """The rows of two nodes with a batch, beside the speed of the row with one node and this batch."""
    bars = []
    for name, comparison in group.compared_with(one_node).items():
        row = group.rows[name]
        speed = row.summary
        text = f"{speed.median:.0f}   × {comparison.summary.median:.2f}"
        bars.append(Bar(row.facts["link"], speed.median, speed, text))
    alone = group.rows[one_node].summary.median
    draw_bars(panel, bars, 0.04 * alone)
    panel.axvline(2 * alone, **DASHED)
    panel.set_xlim(0, 2.8 * alone)
    batch = group.rows[one_node].facts["batch_per_process"]
    panel.set_title(f"DDP on two nodes, {batch} images for each process")
