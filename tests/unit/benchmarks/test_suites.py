"""`pytest benchmarks` and its parts: what they keep, what they leave out and say so; `pytest` leaves them out."""

import importlib.util
import json
import runpy
import shutil

import pytest

from benchmarks.harness.groups import CannotMeasure, Extent
from benchmarks.report import __main__ as command
from benchmarks.report import readmes
from benchmarks.suites import network, overhead
from common import ladder
from tests.nested_pytest import run_pytest

SYNTHETIC = ("--dataset", "synthetic")
PEERS = {"accelerate", "lightning", "transformers"}


def _pytest(*arguments: str) -> str:
    done = run_pytest("-q", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_plain_pytest_does_not_run_the_benchmarks(pytestconfig):
    assert pytestconfig.getini("testpaths") == ["tests"]


FILES = ladder.ROOT.glob("benchmarks/suites/*.py")
SUITES = sorted(path for path in FILES if not path.name.startswith(("test_", "__")))


@pytest.mark.parametrize("path", SUITES, ids=lambda path: path.stem)
def test_a_suite_that_is_started_as_a_program_says_in_a_line_how_it_is_run(path):
    with pytest.raises(SystemExit, match=f"^error: a suite is run by: pytest benchmarks -k test_{path.stem}$"):
        runpy.run_path(str(path), run_name="__main__")
    assert path.with_name(f"test_{path.name}").exists()


@pytest.mark.slow
def test_everything_is_drawn_again_from_a_folder_of_records(tmp_path, monkeypatch, capsys, coarse, report):
    with pytest.raises(SystemExit):
        command.main([str(tmp_path)])
    assert f"nothing to draw from in {tmp_path}" in capsys.readouterr().err
    (tmp_path / "network.json").write_text("{")
    with pytest.raises(SystemExit):
        command.main([str(tmp_path)])
    assert "network.json: " in capsys.readouterr().err
    (tmp_path / "network.json").unlink()
    (tmp_path / "results.json").write_text(json.dumps(report))
    with pytest.raises(SystemExit):
        command.main([str(tmp_path), "--out", "/proc/x"])
    assert "nothing can be written to /proc/x" in capsys.readouterr().err
    for name in ("anatomy", "overlap", "timeline"):
        shutil.copy(readmes.RESULTS / f"{name}.json", tmp_path)
    command.main([str(tmp_path), "--out", str(tmp_path / "again")])
    shown = capsys.readouterr().out
    assert "in the lanes" in shown and "IN STEP" in shown
    drawn = {path.name for path in (tmp_path / "again").iterdir()}
    assert {
        "report.html",
        "memory.png",
        "anatomy.png",
        "overlap.png",
        "timeline-1-gbit.png",
        "timeline-1-gbit.trace.json",
    } <= drawn


def test_without_the_peers_their_rows_are_left_out_and_it_is_said(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in PEERS else real(name))
    rows = list(overhead.contestants())
    assert not any(name.split(".")[0].split(",")[0] in PEERS for name in rows) and "common.trainer" in rows
    (note,) = overhead.skipped()
    assert all(peer in note for peer in PEERS)
    monkeypatch.undo()
    if all(real(peer) for peer in PEERS):
        assert overhead.skipped() == []


def test_two_nodes_are_looked_for_when_they_are_needed_and_not_before(monkeypatch):
    monkeypatch.setattr(network, "why_not", lambda: pytest.fail("a namespace was made while tests are collected"))
    (group,) = network.groups()
    assert len(group.rows) == 10
    monkeypatch.setattr(network, "why_not", lambda: "network namespaces need root")
    extent = Extent(rounds=1, seconds=0.1, data_flags=SYNTHETIC, quick=True)
    with pytest.raises(CannotMeasure, match="no two nodes: network namespaces need root"):
        group.measure(group.rows, extent)
