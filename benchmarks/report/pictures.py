"""The records that become pictures, and what draws each of them from its record alone."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.report import memory_plot, network_plot, overhead_plot, throughput_plot, timeline_plot
from benchmarks.report.plots import STYLE

COMPARISON = "results"
# The functions that draw pictures, by the names of the record and of the picture's file. Each takes the record and the
# path. `draw_link` draws nothing where the record has no group of its link.
PICTURES: dict[str, dict[str, Callable[[dict, Path], None]]] = {
    COMPARISON: {"throughput.png": throughput_plot.draw_speeds, "memory.png": memory_plot.draw_devices},
    "sharing": {"sharing.png": memory_plot.draw_sharing},
    "throughput": {"scaling.png": throughput_plot.draw_scaling},
    "overhead": {"overhead.png": overhead_plot.draw_overhead},
    "network": {"network.png": network_plot.draw_network},
    "one_step": {"one_step.png": timeline_plot.draw_levels},
    # By the "link" of the record's groups.
    "timeline": {
        "timeline-1-gbit.png": partial(timeline_plot.draw_link, "1 Gbit/s"),
        "timeline-100-mbit.png": partial(timeline_plot.draw_link, "100 Mbit/s"),
        "timeline-loopback.png": partial(timeline_plot.draw_link, "loopback"),
    },
}


def draw(name: str, record: dict, folder: Path) -> list[str]:
    """Draw the pictures of a record, in place of older ones of their names; returns the names of those drawn."""
    import matplotlib

    drawn = []
    for file, picture in PICTURES.get(name, {}).items():
        path = folder / file
        path.unlink(missing_ok=True)  # an older one could be taken for new
        with matplotlib.rc_context(STYLE):
            picture(record, path)
        if path.exists():
            drawn.append(file)
    return drawn
