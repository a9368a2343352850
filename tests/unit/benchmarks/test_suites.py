"""What a session of `pytest benchmarks` shows and records, and what suites do where something is missing.

`.ci/run bench` measures, records and draws all of them.
"""

import importlib.util
import json

import pytest

from benchmarks.harness import records
from benchmarks.harness.groups import CannotMeasure, MeasureOptions, seconds_per_step
from benchmarks.suites import network, overhead
from tests.nested_pytest import run_pytest

QUICK = MeasureOptions(rounds=2, data_flags=("--dataset", "synthetic"), quick=True)


@pytest.mark.slow
def test_a_session_shows_the_rows_that_were_selected_and_records_their_group(tmp_path):
    """pytest-benchmark is shown a test for each row; the group is recorded with when it was measured."""
    saved = tmp_path / "saved.json"
    written = ["--record", str(tmp_path), f"--benchmark-json={saved}"]
    done = run_pytest("benchmarks", "--quick", "-k", "overhead and raw", *written)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "overhead.png").exists()
    record = json.loads((tmp_path / "overhead.json").read_text())
    (group,) = record["groups"]
    assert (group["began"], group["ended"]) == (record["began"], record["ended"])
    assert set(group["rows"]) == set(overhead.contestants())
    selected = [group["rows"][name] for name in (overhead.RAW, overhead.RAW_LIKE_TRAINER)]
    shown = [row["stats"]["data"] for row in json.loads(saved.read_text())["benchmarks"]]
    for seconds, row in zip(shown, selected, strict=True):
        assert seconds == pytest.approx([1e-6 * sample for sample in row["samples"]])


@pytest.mark.parametrize(("unit", "seconds"), [("ms", 0.02), ("µs", 2e-5), ("images/s", 3.2)])
def test_every_unit_becomes_the_seconds_of_a_step(unit, seconds):
    record = records.group("g", unit, {"a": [20.0]}, {"a": {"global_batch_size": 64}})
    assert seconds_per_step(record, "a") == [pytest.approx(seconds)]


def test_without_the_peers_their_rows_are_left_out_and_it_is_said(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in overhead.PEERS else real(name))
    ours = {overhead.RAW, overhead.RAW_LIKE_TRAINER, "common.trainer"}
    assert set(overhead.contestants()) == ours | {"common.accelerator", "common.accelerator, accumulate()"}
    monkeypatch.setattr(overhead, "measure", lambda contestants, rounds: {})
    (note,) = overhead.measure_group(QUICK)["skipped"]
    assert all(peer in note for peer in overhead.PEERS)


def test_two_nodes_are_looked_for_when_they_are_measured_and_not_when_tests_are_collected(monkeypatch):
    monkeypatch.setattr(network, "why_not", lambda: "network namespaces need root")
    (group,) = network.groups()
    with pytest.raises(CannotMeasure, match="no two nodes: network namespaces need root"):
        group.measure(QUICK)
