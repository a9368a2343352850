"""The pictures come from the records alone, and from nothing older."""

import json

import pytest

from benchmarks.harness.rows import DATA_PARALLEL, DDP, accounted_totals, is_share
from benchmarks.report import __main__ as command
from benchmarks.report import page_tables, pictures
from benchmarks.report.pictures import COMPARISON, PICTURES
from benchmarks.report.throughput_plot import speed_ups


@pytest.mark.parametrize("name", PICTURES)
def test_every_picture_on_a_page_is_what_its_record_makes(name, tmp_path, coarse):
    from matplotlib.image import imread

    assert pictures.draw(name, page_tables.recorded(name), tmp_path) == list(PICTURES[name])
    for file in PICTURES[name]:
        height, width, _ = imread(page_tables.RESULTS / file).shape
        # Some twice as wide as it is shown.
        assert 1500 <= width <= 1700 and 0.25 * width <= height <= 1.5 * width
        drawn_height, drawn_width, _ = imread(tmp_path / file).shape
        assert height / width == pytest.approx(drawn_height / drawn_width, 0.01)


def test_a_comparison_is_drawn_again_and_no_older_picture_stays(tmp_path, capsys, coarse, report):
    with pytest.raises(SystemExit):
        command.main([str(tmp_path)])
    assert f"nothing to draw from in {tmp_path}" in capsys.readouterr().err
    for file in ("throughput.png", "memory.png"):
        (tmp_path / file).write_bytes(b"an older picture")
    report |= {"throughput": [], "memory": [row for row in report["memory"] if row["devices"] == 2]}
    (tmp_path / "results.json").write_text(json.dumps(report))
    command.main([str(tmp_path)])
    assert "IN STEP" in capsys.readouterr().out
    assert (tmp_path / "memory.png").stat().st_size > 1000 and not (tmp_path / "throughput.png").exists()


@pytest.fixture
def panels(report, tmp_path, coarse, monkeypatch):
    """`panels(file)`: the panels of a picture of the comparison, and the text below it."""

    def panels_of(file: str):
        drawn = []
        picture = PICTURES[COMPARISON][file]
        monkeypatch.setitem(picture.__globals__, "save", lambda figure, *args: drawn.append((figure.axes, args[1])))
        picture(report, tmp_path / file)
        return drawn[0]

    return panels_of


def test_whiskers_are_the_quartiles_and_bars_the_medians(report, panels):
    (panel, _), _ = panels("throughput.png")
    rows = [row for row in report["throughput"][0]["rows"].values() if not is_share(row)]
    assert [bar.get_width() for bar in panel.patches] == [row["median"] for row in rows]
    whiskers = [collection.get_segments()[0] for collection in panel.collections]
    for ends, row in zip(whiskers, rows, strict=True):
        assert (ends[0][0], ends[1][0]) == pytest.approx((row["low"], row["high"]))


def test_the_memory_plot_stacks_the_categories_and_tells_the_ratio(panels):
    axes, told = panels("memory.png")
    assert told.startswith("Simulated")
    for panel, devices in zip(axes, (2, 4, 8), strict=False):  # of the first network
        assert len(panel.patches) == 2 * devices * 6
        tops = {round(bar.get_x() + bar.get_width() / 2): bar.get_y() + bar.get_height() for bar in panel.patches}
        rows = [page_tables.memory_row("basic_net", wrapper, devices) for wrapper in (DATA_PARALLEL, DDP)]
        sizes = [accounted_totals(row) for row in rows]
        assert list(tops.values()) == pytest.approx([size / 2**20 for size in sizes[0] + sizes[1]])
        ratios = [text.get_text() for text in panel.texts if "ratio" in text.get_text()]
        assert ratios == [f"ratio\n{max(of_devices) / min(of_devices):.2f}" for of_devices in sizes]


def test_measured_memory_is_marked_and_named(report, panels):
    report["memory"][0] |= {"allocated": [44 * 2**20, 0]}
    axes, told = panels("memory.png")
    assert "diamonds: measured by CUDA's allocator" in told
    marked = [line for line in axes[0].lines if line.get_marker() == "D"]
    assert [list(line.get_ydata()) for line in marked] == [[44, 0]]
    assert "ratio\ninf" in [text.get_text() for text in axes[0].texts]


def test_a_bar_of_scaling_is_what_several_devices_or_all_cores_reach_of_one():
    for group in page_tables.recorded("throughput")["groups"]:
        rows = [group["rows"][name] for name in speed_ups(group)]
        several = [(f"0{level}", 2) for level in (1, 2, 3, 4)]
        assert [(row["level"][:2], row["workers"]) for row in rows] == [*several, ("00", 1)]
