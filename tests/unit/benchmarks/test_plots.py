"""The pictures come from the records alone, and from nothing older."""

import json
from pathlib import Path
from unittest import mock

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from benchmarks.harness.records import totals
from benchmarks.harness.rows import DATA_PARALLEL, DDP
from benchmarks.report import __main__ as command
from benchmarks.report import page_tables, pictures, plots
from benchmarks.report.pictures import COMPARISON, PICTURES


@pytest.fixture(autouse=True)
def coarse(monkeypatch):
    monkeypatch.setattr(plots, "DPI", 40)


@pytest.mark.parametrize("name", PICTURES)
def test_every_picture_on_a_page_has_the_shape_of_what_its_record_makes(name, tmp_path):
    assert pictures.draw(name, page_tables.recorded(name), tmp_path) == list(PICTURES[name])
    for file in PICTURES[name]:
        height, width, _ = imread(page_tables.RESULTS / file).shape
        drawn_height, drawn_width, _ = imread(tmp_path / file).shape
        assert height / width == pytest.approx(drawn_height / drawn_width, 0.01)


def test_a_comparison_is_drawn_again(tmp_path, capsys, report):
    (tmp_path / "memory.png").write_bytes(b"an older picture")
    (tmp_path / "results.json").write_text(json.dumps(report))
    command.main([str(tmp_path)])
    assert "IN STEP" in capsys.readouterr().out
    assert (tmp_path / "memory.png").stat().st_size > 1000


def test_a_folder_without_records_is_an_error(tmp_path):
    with pytest.raises(SystemExit, match="nothing to draw"):
        command.main([str(tmp_path / "mistyped")])


def panels(path: Path, report: dict) -> list:
    with mock.patch.object(Figure, "savefig", autospec=True) as savefig:
        savefig.side_effect = lambda figure, draft, format: draft.touch()
        PICTURES[COMPARISON][path.name](report, path)
    figure, _ = savefig.call_args.args
    return figure.axes


def test_bars_of_speed_are_the_medians_and_whiskers_the_quartiles(report, tmp_path):
    panel, _ = panels(tmp_path / "throughput.png", report)
    rows = report["throughput"][0]["rows"].values()
    assert [bar.get_width() for bar in panel.patches] == [row["median"] for row in rows]
    whiskers = [collection.get_segments()[0][:, 0] for collection in panel.collections]
    for ends, row in zip(whiskers, rows, strict=True):
        assert list(ends) == pytest.approx([row["low"], row["high"]])


def test_stacks_of_memory_are_as_high_as_what_each_device_holds(report, tmp_path):
    axes = panels(tmp_path / "memory.png", report)
    recorded = page_tables.recorded_peaks()
    for panel, devices in zip(axes, (2, 4, 8), strict=False):  # of the first network
        tops = {round(bar.get_x() + bar.get_width() / 2): bar.get_y() + bar.get_height() for bar in panel.patches}
        rows = [recorded["basic_net", wrapper, devices] for wrapper in (DATA_PARALLEL, DDP)]
        sizes = [size / 2**20 for row in rows for size in totals(row)]
        assert list(tops.values()) == pytest.approx(sizes)
