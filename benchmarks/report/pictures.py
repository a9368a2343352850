"""The suites whose records become pictures, and what draws them: `draw(groups, machine, folder)` returns its files."""

from benchmarks.report import (
    anatomy_plot,
    larger_batches_plot,
    network_plot,
    scaling_plot,
    timeline_plot,
)

DRAWN = {
    "anatomy": anatomy_plot.draw,
    "larger_batches": larger_batches_plot.draw,
    "network": network_plot.draw,
    "throughput": scaling_plot.draw,
    "timeline": timeline_plot.draw,
}
