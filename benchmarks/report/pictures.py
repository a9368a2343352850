"""The suites whose records become pictures, and what draws them: `draw(groups, machine, folder)` returns its files."""

from benchmarks.report import network_plot, overlap_plot, timeline_plot

DRAWN = {
    "network": network_plot.draw,
    "overlap": overlap_plot.draw,
    "timeline": timeline_plot.draw,
}
