"""The plot of `benchmarks.suites.network`: two nodes over each link against one, drawn from its record alone."""

from pathlib import Path

from benchmarks.report.plots import BLUE, CLEAR, INK, STYLE, VERMILION, save, subplots

NAME = "network.png"


def draw(groups: list[dict], machine: dict, folder: Path) -> list[str]:
    """Write network.png into `folder`, in place of an older one; returns its name.

    Args:
        groups: one, of `benchmarks.suites.network.record`. KeyError is raised if something in it is missing.
        machine: of `benchmarks.harness.records.machine`.
    """
    import matplotlib

    (group,) = groups
    batches = sorted({row["batch_per_process"] for row in group["rows"].values()})
    with matplotlib.rc_context(STYLE):
        figure, panels = subplots(len(batches), 1, 1.2 + 2.4 * len(batches))
        for panel, batch in zip(panels, batches, strict=True):
            _panel(panel, group, batch)
        panels[-1].set_xlabel("images per second, both nodes")
        told = f"Measured: medians of {group['rounds']} rounds in turn, and quartiles; × paired ratio to one node"
        save(figure, folder / NAME, f"{told}. Dashed: twice one node", machine)
    return [NAME]


def _panel(panel, group: dict, batch: int) -> None:
    """A bar for each link between two nodes with this batch of each process."""
    own = {name: row for name, row in group["rows"].items() if row["batch_per_process"] == batch}
    (alone,) = [row["median"] for row in own.values() if row["nodes"] == 1]
    ratios = {pair["of"]: pair["median"] for pair in group["pairs"]}
    links = {name: row for name, row in own.items() if row["nodes"] == 2}
    for y, (name, row) in enumerate(links.items()):
        panel.barh(y, row["median"], 0.62, color=BLUE, alpha=0.85)
        whiskers = [[row["median"] - row["low"]], [row["high"] - row["median"]]]
        panel.errorbar(row["median"], y, xerr=whiskers, color=INK, capsize=4, linewidth=1.4)
        beside = f"{row['median']:.0f}   × {ratios[name]:.2f}"
        panel.text(row["high"] + 0.04 * alone, y, beside, va="center", bbox=CLEAR)
    panel.axvline(2 * alone, color=VERMILION, linestyle="--", linewidth=1.4)
    panel.set_yticks(range(len(links)), [name.partition(",")[0] for name in links])
    panel.invert_yaxis()
    panel.set_xlim(0, 2.8 * alone)
    panel.grid(axis="x")
    panel.tick_params(axis="y", length=0)
    panel.set_title(f"DDP on two nodes, {batch} images for each process")
