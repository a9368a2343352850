"""What a session of `pytest benchmarks` shows and records, and what suites do where something is missing.

`.ci/run bench` measures, records and draws all of them.
"""

import importlib.util
import json
import os

import pytest

from benchmarks.harness import records
from benchmarks.harness.groups import CannotMeasure, Extent, seconds_per_step
from benchmarks.suites import network, overhead
from common import ladder
from tests.nested_pytest import run_pytest

PEERS = {"accelerate", "lightning", "transformers"}
QUICK = Extent(rounds=2, seconds=0.1, data_flags=("--dataset", "synthetic"), quick=True)
# Contestants that take no time: what is tested is what happens to their samples.
SPY = """
from common import allocator
allocator.keep_large_blocks = lambda: print("ALLOCATOR ASKED")
from benchmarks.suites import overhead
seconds = iter(range(1, 100))
overhead.contestants = lambda: {name: lambda: 1e-6 * next(seconds) for name in ("raw loop", "common.accelerator")}
"""


@pytest.mark.slow
def test_a_session_shows_the_rows_that_were_selected_and_records_their_group(tmp_path):
    """pytest-benchmark is shown a test for each row; the group is recorded with when it was measured."""
    (tmp_path / "spy.py").write_text(SPY)
    out, saved = tmp_path / "out", tmp_path / "saved.json"
    selected = ["-k", "overhead and raw", "-s", "-p", "spy"]
    written = ["--record", str(out), f"--benchmark-json={saved}"]
    paths = os.pathsep.join([str(tmp_path), str(ladder.ROOT)])
    done = run_pytest("benchmarks", "--quick", *selected, *written, folder=ladder.ROOT, PYTHONPATH=paths)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ALLOCATOR ASKED" in done.stdout.partition("test_suites.py")[0]
    assert "written to" in done.stdout and (out / "overhead.png").exists()
    record = json.loads((out / "overhead.json").read_text())
    (group,) = record["groups"]
    assert (group["began"], group["ended"]) == (record["began"], record["ended"])
    assert set(group["rows"]) == {"raw loop", "common.accelerator"}
    (shown,) = json.loads(saved.read_text())["benchmarks"]
    assert shown["stats"]["data"] == pytest.approx([1e-6 * sample for sample in group["rows"]["raw loop"]["samples"]])


@pytest.mark.parametrize(("unit", "seconds"), [("ms", 0.02), ("µs", 2e-5), ("images/s", 3.2)])
def test_every_unit_becomes_the_seconds_of_a_step(unit, seconds):
    record = records.group("g", unit, {"a": [20.0]}, {"a": {"global_batch_size": 64}})
    assert seconds_per_step(record, "a") == [pytest.approx(seconds)]


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
    monkeypatch.setattr(network, "why_not", lambda: "network namespaces need root")
    with pytest.raises(CannotMeasure, match="no two nodes: network namespaces need root"):
        group.measure(QUICK)
