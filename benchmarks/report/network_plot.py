"""The plots of `benchmarks.suites.network`, drawn from its record alone: measured and predicted are kept apart."""

from pathlib import Path

import numpy

from benchmarks.report.plots import BLUE, GREEN, ORANGE, SMALL, SOFT, STYLE, VERMILION, save, subplots
from benchmarks.suites.network import Calibration, rows_of_links

COLOURS, MARKERS = (BLUE, VERMILION, GREEN, ORANGE), ("o", "s", "^", "D")
HEIGHT = 4.9  # inches
NODES = [2**power for power in range(13)]


def draw(groups: list[dict], machine: dict, folder: Path) -> list[str]:
    """Write network.png and network_prediction.png into `folder`, in place of older ones; returns their names.

    Args:
        groups: one, of `benchmarks.suites.network.record`. KeyError is raised if something in it is missing.
        machine: of `benchmarks.harness.records.machine`.
    """
    import matplotlib

    (result,) = groups
    names = ["network.png", "network_prediction.png"]
    for name in names:
        (folder / name).unlink(missing_ok=True)
    models = {int(batch): Calibration(**model) for batch, model in result["calibration"].items()}
    with matplotlib.rc_context(STYLE):
        _measured(result, models, machine, folder / names[0])
        _predicted(result, models, machine, folder / names[1])
    return names


def _measured(result: dict, models: dict[int, Calibration], machine: dict, path: Path) -> None:
    """Images per second against the TCP rate: medians and quartiles, and the model's two lines."""
    figure, (panel,) = subplots(1, 1, HEIGHT)
    rows = list(rows_of_links(result).values())
    rates = [row["tcp_bits_per_sec"] for row in rows]
    across = numpy.geomspace(min(rates) / 1.6, max(rates) * 1.6, 200)
    for (batch, model), colour, marker in zip(models.items(), COLOURS, MARKERS, strict=False):
        own = [row for row in rows if row["batch_per_process"] == batch]
        whiskers = [[row["median"] - row["low"] for row in own], [row["high"] - row["median"] for row in own]]
        points = {"x": [row["tcp_bits_per_sec"] / 1e9 for row in own], "y": [row["median"] for row in own]}
        looks = {"color": colour, "marker": marker, "linestyle": "none", "capsize": 5, "markersize": 8}
        panel.errorbar(**points, yerr=whiskers, **looks, label=f"{batch} per process, measured")
        if model.alone:
            twice = 2 * batch / model.alone
            panel.axhline(twice, color=colour, linestyle="--", linewidth=1, label=f"{batch}, twice one node, measured")
        for overlap, line, name in ((True, "-", "model"), (False, ":", "model, no overlap")):
            heights = [2 * batch / model.step(rate, overlap=overlap) for rate in across]
            panel.plot([rate / 1e9 for rate in across], heights, line, color=colour, label=f"{batch}, {name}")
    panel.set(xscale="log", xlabel="rate of a plain TCP transfer, Gbit/s", ylabel="images per second, both nodes")
    _, highest = panel.get_ylim()
    panel.set_ylim(0, 1.5 * highest)  # room for the legend
    panel.xaxis.set_major_formatter("{x:g}")
    panel.set_title("DDP on two nodes against the network between them")
    panel.grid()
    panel.legend(fontsize=SMALL, ncols=2, loc="upper left")
    told = f"Measured; the model knows the unlimited runs only. Medians of {result['rounds']} rounds, quartiles"
    save(figure, path, told, machine)


def _predicted(result: dict, models: dict[int, Calibration], machine: dict, path: Path) -> None:
    """What the network leaves of a step, against the number of nodes, for the bandwidths that were given as limits."""
    figure, (panel,) = subplots(1, 1, HEIGHT)
    batch, model = max(models.items())
    limits = {name.split(",")[0]: row["nominal_bits_per_sec"] for name, row in rows_of_links(result).items()}
    limits = {name: limit for name, limit in limits.items() if limit}
    for (name, limit), colour, line in zip(limits.items(), COLOURS, ("-", "--", "-.", ":"), strict=False):
        heights = [100 * model.efficiency(limit, nodes) for nodes in NODES]
        panel.plot(NODES, heights, color=colour, linestyle=line, linewidth=2, label=name)
    panel.axvspan(1, 2, color=SOFT, alpha=0.15, linewidth=0)
    panel.text(2.15, 3, "← calibrated here", fontsize=SMALL, color=SOFT)
    panel.set(xscale="log", xlabel="nodes, one process each", ylabel="% of a step spent computing")
    panel.set_ylim(0, 104)
    panel.set_xticks([1, 4, 16, 64, 256, 1024, 4096], ["1", "4", "16", "64", "256", "1024", "4096"])
    panel.minorticks_off()
    panel.set_title(f"PREDICTION: DDP over a ring, {batch} images per process")
    panel.grid()
    panel.legend(fontsize=SMALL)
    told = f"Predicted by the model calibrated on two nodes: {1000 * model.compute:.0f} ms of compute a step, "
    told += f"{1e6 * model.latency:.0f} µs a message, 2(n−1) messages in a row. 100 %: no node waits for the network"
    if model.alone:
        slower = model.compute / model.alone - 1
        told += f". Left out: the two nodes compute {slower:.0%} longer than one alone, as they share one machine"
    save(figure, path, told, machine)
