"""The plots come from the results alone, and from nothing older."""

import pytest

from benchmarks.report import plots
from benchmarks.report.table import shown_rows

PLOTS = {
    "throughput": "throughput.png",
    "memory": "memory.png",
    "four_devices": "four_devices.png",
    "overhead": "overhead.png",
}
# The results that a plot shows, by the name of the plot.
RESULTS = {plot: plot for plot in PLOTS} | {"four_devices": "memory"}


def _pixels(path):
    from matplotlib.image import imread

    return imread(path)


def test_all_plots_are_drawn_twice_as_wide_as_they_are_shown(report, tmp_path):
    assert plots.draw(report, tmp_path) == (list(PLOTS.values()), [])
    for name in PLOTS.values():
        height, width, _ = _pixels(tmp_path / name).shape
        assert 1500 <= width <= 1700 and 0.25 * width <= height <= 1.2 * width
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(PLOTS.values())


ONE, *OTHERS = [(plot, name) for plot, name in PLOTS.items() if plot != "overhead"]


@pytest.mark.parametrize("plot, name", [ONE, *(pytest.param(*other, marks=pytest.mark.slow) for other in OTHERS)])
def test_a_plot_whose_results_are_missing_fails_and_takes_the_old_one_with_it(report, tmp_path, coarse, plot, name):
    (tmp_path / name).write_bytes(b"an older plot")
    if plot == "four_devices":
        report["memory"] = [row for row in report["memory"] if row["devices"] != 4]
    else:
        del report[plot]
    without = [PLOTS[each] for each in PLOTS if each == plot or (plot, RESULTS[each]) == ("memory", "memory")]
    with pytest.raises(plots.MissingResults):
        plots.draw(report, tmp_path)
    assert not (tmp_path / name).exists()
    report["complete"] = False
    drawn, missing = plots.draw(report, tmp_path)
    assert not set(without) & set(drawn) and len(drawn) == len(PLOTS) - len(without)
    assert [line.split(" was not drawn: ")[0] for line in missing] == without


# What the plots of throughput and memory show of their results is looked at below.
@pytest.mark.slow
@pytest.mark.parametrize("key", ["four_devices", "overhead"])
def test_other_results_make_another_plot(report, tmp_path, coarse, key):
    plot, path = getattr(plots, key), tmp_path / PLOTS[key]
    plot(report, path)
    before = _pixels(path)
    plot(report, path)
    assert (_pixels(path) == before).all()
    if RESULTS[key] == "memory":
        for row in report["memory"]:
            row["peaks"][0]["activations"] *= 2
    else:
        group = report[key][0]
        for entry in (*group["rows"].values(), *group["pairs"]):
            entry["median"] *= 1.1
            entry["high"] *= 1.2
    plot(report, path)
    after = _pixels(path)
    assert after.shape != before.shape or (after != before).any()


@pytest.fixture
def figures(monkeypatch, coarse):
    """The figures that a test has drawn."""
    drawn, subplots = [], plots.subplots

    def recorded(*args):
        figure, panels = subplots(*args)
        drawn.append(figure)
        return figure, panels

    monkeypatch.setattr(plots, "subplots", recorded)
    return drawn


def _below(figure) -> str:
    """The text below a plot, in one line."""
    (text,) = figure.texts
    return " ".join(text.get_text().split())


def test_whiskers_are_the_quartiles_and_bars_the_medians(report, tmp_path, figures):
    plots.throughput(report, tmp_path / "throughput.png")
    (figure,) = figures
    (panel,) = figure.axes
    rows = list(shown_rows(report["throughput"][0]).values())
    assert [bar.get_width() for bar in panel.patches] == [row["median"] for row in rows]
    whiskers = [collection.get_segments()[0] for collection in panel.collections]
    assert [(ends[0][0], ends[1][0]) for ends in whiskers] == [pytest.approx((row["low"], row["high"])) for row in rows]
    assert panel.get_xlabel() == "images per second"


def test_the_memory_plot_stacks_the_categories_and_tells_the_ratio(report, tmp_path, figures):
    plots.memory(report, tmp_path / "memory.png")
    (figure,) = figures
    assert _below(figure).startswith("Simulated")
    assert _below(figure).endswith("x86_64, 2 CPU cores, no GPU, torch 2.11.0.")
    for panel, devices in zip(figure.axes, (2, 4, 8), strict=True):
        assert len(panel.patches) == 2 * devices * 6
        tops = {round(bar.get_x() + bar.get_width() / 2): bar.get_y() + bar.get_height() for bar in panel.patches}
        assert list(tops.values()) == [40] + [20] * (devices - 1) + [40] * devices
        ratios = [text.get_text() for text in panel.texts if "ratio" in text.get_text()]
        assert ratios == ["ratio\n2.00", "ratio\n1.00"]


@pytest.mark.parametrize(
    "row, held, ratios",
    [
        pytest.param(0, [44, 0], ["ratio\ninf", "ratio\n1.00"], id="a device held nothing"),
        pytest.param(1, [44, 22], ["ratio\n2.00", "ratio\n2.00"], id="ranks differ"),
    ],
)
def test_measured_memory_is_marked_and_named(row, held, ratios, report, tmp_path, figures):
    report["memory"][row] |= {"allocated": [mib * 2**20 for mib in held], "source": "measured"}
    plots.memory(report, tmp_path / "memory.png")
    (figure,) = figures
    assert "diamonds: measured by CUDA's allocator" in _below(figure)
    panel = figure.axes[0]
    marked = [line for line in panel.lines if line.get_marker() == "D"]
    assert [list(line.get_ydata()) for line in marked] == [held]
    assert [text.get_text() for text in panel.texts if "ratio" in text.get_text()] == ratios
