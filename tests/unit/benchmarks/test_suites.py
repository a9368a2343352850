"""All suites, each as short as `--quick` makes it; and what they do where something is missing."""

import importlib.util
import json

import pytest

from benchmarks.harness import records
from benchmarks.harness.groups import CannotMeasure, Extent
from benchmarks.report import __main__ as command
from benchmarks.report.pictures import DRAWN
from benchmarks.suites import anatomy, network, overhead, throughput, timeline

SYNTHETIC = ("--dataset", "synthetic")
PEERS = {"accelerate", "lightning", "transformers"}
SUITES = {"anatomy": anatomy, "network": network, "overhead": overhead, "throughput": throughput, "timeline": timeline}
QUICK = Extent(rounds=2, seconds=0.1, data_flags=SYNTHETIC, quick=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", SUITES)
def test_a_suite_measures_records_and_draws_all_rows_of_its_groups(name, tmp_path, coarse, capsys):
    measured = []
    for group in SUITES[name].groups():
        try:
            measured.append(group.measure(group.rows, QUICK))
        except CannotMeasure:
            continue  # the larger batches, or two nodes where there can be none
        assert set(measured[-1]["rows"]) <= set(group.rows) and measured[-1]["group"] == group.title
        assert all(len(row["samples"]) == QUICK.rounds for row in measured[-1]["rows"].values())
        assert max(map(len, records.table(measured[-1]).splitlines())) <= 80
    if not measured:
        pytest.skip("nothing of this suite can be measured here")
    records.write(tmp_path / f"{name}.json", name, records.circumstances(), groups=measured)
    if name in DRAWN:
        command.main([str(tmp_path)])
        assert "Written to" in capsys.readouterr().out and list(tmp_path.glob("*.png"))


def test_a_comparison_is_drawn_again_from_its_record(tmp_path, capsys, coarse, report):
    with pytest.raises(SystemExit):
        command.main([str(tmp_path)])
    assert f"nothing to draw from in {tmp_path}" in capsys.readouterr().err
    (tmp_path / "results.json").write_text(json.dumps(report))
    command.main([str(tmp_path), "--out", str(tmp_path)])
    assert "IN STEP" in capsys.readouterr().out and (tmp_path / "memory.png").exists()


def test_plain_pytest_does_not_run_the_benchmarks(pytestconfig):
    assert pytestconfig.getini("testpaths") == ["tests"]


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
    with pytest.raises(CannotMeasure, match="no two nodes: network namespaces need root"):
        group.measure(group.rows, QUICK)
