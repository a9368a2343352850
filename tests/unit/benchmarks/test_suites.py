"""All suites, each as short as `--quick` makes it; and what they do where something is missing."""

import importlib.util
import json
import os

import pytest

from benchmarks.harness import records
from benchmarks.harness.groups import CannotMeasure, Extent, seconds_per_step
from benchmarks.report import pictures
from benchmarks.suites import anatomy, larger_batches, network, overhead, throughput, timeline
from common import ladder
from tests.nested_pytest import run_pytest

SYNTHETIC = ("--dataset", "synthetic")
PEERS = {"accelerate", "lightning", "transformers"}
SUITES = {
    "anatomy": anatomy,
    "larger_batches": larger_batches,
    "network": network,
    "overhead": overhead,
    "throughput": throughput,
    "timeline": timeline,
}
QUICK = Extent(rounds=2, seconds=0.1, data_flags=SYNTHETIC, quick=True)
SPY = """
from common import allocator
allocator.keep_large_blocks = lambda: print("ALLOCATOR ASKED")
"""


# `.ci/run bench` measures, records and draws all of them.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "overhead" else pytest.mark.long) for name in SUITES]
)
def test_a_suite_measures_records_and_draws_all_rows_of_its_groups(name, tmp_path, coarse):
    measured = []
    for group in SUITES[name].groups():
        try:
            measured.append(group.measure(QUICK))
        except CannotMeasure:
            continue  # the larger batches, or two nodes where there can be none
        assert set(group.rows) <= set(measured[-1]["rows"]) | {row for row in group.rows if "256" in row}
        assert measured[-1]["rows"] and measured[-1]["group"] == group.title
        assert max(map(len, records.table(measured[-1]).splitlines())) <= 80
    if not measured:
        pytest.skip("nothing of this suite can be measured here")
    record = records.write(tmp_path, name, measured, records.circumstances())
    assert pictures.draw(name, json.loads(json.dumps(record)), tmp_path)


@pytest.mark.slow
def test_a_session_shows_the_rows_that_were_selected_and_keeps_their_groups(tmp_path):
    """pytest-benchmark is shown a test for each row; the groups are recorded with when they were measured."""
    (tmp_path / "spy.py").write_text(SPY)
    out, saved = tmp_path / "out", tmp_path / "saved.json"
    selected = ["-k", "memory-1 or (overhead and (raw or accelerator)) and not Trainer", "-s", "-p", "spy"]
    written = ["--record", str(out), f"--benchmark-json={saved}"]
    paths = os.pathsep.join([str(tmp_path), str(ladder.ROOT)])
    done = run_pytest("benchmarks", "--quick", *selected, *written, folder=ladder.ROOT, PYTHONPATH=paths)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ALLOCATOR ASKED" in done.stdout.partition("test_suites.py")[0]
    memory, overhead_ = (json.loads((out / f"{suite}.json").read_text()) for suite in ("memory", "overhead"))
    assert overhead_["began"]["date"] <= overhead_["ended"]["date"] <= memory["ended"]["date"]
    assert [row["devices"] for row in memory["groups"][0]["memory"]] == [1] * 15
    (group,) = overhead_["groups"]
    assert (group["began"], group["ended"]) == (overhead_["began"], overhead_["ended"])
    assert {"raw loop", "common.accelerator", "common.trainer"} <= set(group["rows"]) and (
        out / "overhead.png"
    ).exists()
    shown = json.loads(saved.read_text())["benchmarks"]
    assert len(shown) == 3
    for row in shown:
        name = row["params"]["row"]
        assert row["stats"]["data"] == pytest.approx([1e-6 * sample for sample in group["rows"][name]["samples"]])
        assert row["extra_info"]["pairs"] == [pair for pair in group["pairs"] if pair["of"] == name]


@pytest.mark.parametrize(("unit", "seconds"), [("s", 20.0), ("ms", 0.02), ("µs", 2e-5), ("images/s", 3.2)])
def test_every_unit_becomes_the_seconds_of_a_step(unit, seconds):
    record = records.group("g", unit, {"a": [20.0]}, {"a": {"global_batch_size": 64}})
    assert seconds_per_step(record, "a") == [pytest.approx(seconds)]


def test_plain_pytest_does_not_run_the_benchmarks(pytestconfig):
    assert pytestconfig.getini("testpaths") == ["tests"]


def test_without_the_peers_their_rows_are_left_out_and_it_is_said(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in PEERS else real(name))
    rows = list(overhead.contestants())
    assert not any(name.split(".")[0].split(",")[0] in PEERS for name in rows) and "common.trainer" in rows
    monkeypatch.setattr(overhead, "measure", lambda contestants, rounds: {})
    (note,) = overhead.measured(QUICK)["skipped"]
    assert all(peer in note for peer in PEERS)


def test_two_nodes_are_looked_for_when_they_are_needed_and_not_before(monkeypatch):
    monkeypatch.setattr(network, "why_not", lambda: pytest.fail("a namespace was made while tests are collected"))
    (group,) = network.groups()
    assert len(group.rows) == 10
    monkeypatch.setattr(network, "why_not", lambda: "network namespaces need root")
    with pytest.raises(CannotMeasure, match="no two nodes: network namespaces need root"):
        group.measure(QUICK)
