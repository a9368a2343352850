"""What `pytest benchmarks` keeps of a session, and what it shows pytest-benchmark."""

import json
import os

import pytest

from benchmarks.harness import records
from benchmarks.harness.groups import ReplayClock, info, seconds_per_step
from common import ladder
from tests.nested_pytest import run_pytest

SUITE = """
import time
from benchmarks.harness import records
from benchmarks.harness.groups import Group, keyed

def measured(rows, extent):
    time.sleep(1.1)
    return records.group(TITLE, "s", {"row": [1.0]})

TITLE = __name__
GROUPS = keyed([Group(TITLE, TITLE, ("row",), measured)])

def test_row(group_key, row, replay):
    replay(group_key, row)

def test_memory(keep_memory):
    time.sleep(1.1)
    keep_memory([dict(title=TITLE, wrapper="DDP", devices=1, peaks=[{}], allocated=[1])])
"""
SPY = """
from common import allocator
allocator.keep_large_blocks = lambda: print("ALLOCATOR ASKED")
"""


@pytest.mark.slow
def test_every_group_says_when_it_was_measured_and_all_share_one_allocator(tmp_path):
    (tmp_path / "spy.py").write_text(SPY)
    for suite in ("early", "late"):
        (tmp_path / f"test_{suite}.py").write_text(SUITE)
    plugins = ["-p", "spy", "-p", "benchmarks.conftest"]
    arguments = ["-s", *plugins, f"--rootdir={tmp_path}", str(tmp_path), "--record", str(tmp_path / "out")]
    paths = os.pathsep.join([str(tmp_path), str(ladder.ROOT)])
    done = run_pytest(*arguments, folder=tmp_path, PYTHONPATH=paths)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ALLOCATOR ASKED" in done.stdout.partition("test_early.py")[0]
    early, late, memory = (
        json.loads((tmp_path / "out" / f"{suite}.json").read_text()) for suite in ("early", "late", "memory")
    )
    assert early["began"]["date"] < early["ended"]["date"] < late["began"]["date"] < late["ended"]["date"]
    assert early["ended"]["date"] <= memory["began"]["date"] < late["began"]["date"]
    assert late["ended"]["date"] < memory["ended"]["date"]
    assert [row["title"] for row in memory["memory"]] == ["test_early", "test_late"]
    for suite in (early, late):
        (group,) = suite["groups"]
        assert (group["began"], group["ended"]) == (suite["began"], suite["ended"])


@pytest.mark.parametrize(("unit", "seconds"), [("s", 20.0), ("ms", 0.02), ("µs", 2e-5), ("images/s", 3.2)])
def test_every_unit_becomes_the_seconds_of_a_step(unit, seconds):
    record = records.group("g", unit, {"a": [20.0]}, {"a": {"global_batch_size": 64}})
    assert seconds_per_step(record, "a") == [pytest.approx(seconds)]


def test_a_unit_that_is_no_time_is_refused():
    with pytest.raises(ValueError, match="GB is not a time"):
        seconds_per_step(records.group("g", "GB", {"a": [1.0]}), "a")
    with pytest.raises(ValueError, match="global_batch_size"):
        seconds_per_step(records.group("g", "images/s", {"a": [1.0]}), "a")


def test_the_clock_of_a_replay_moves_only_when_it_is_told_to():
    clock = ReplayClock()
    began = clock.now()
    clock.advance(0.1)
    assert clock.now() - began == 0.1
    clock.reset()
    assert clock.now() == 0


def test_a_rows_information_holds_its_own_unit_its_facts_and_its_ratios():
    samples = {"a": [10.0, 12.0, 11.0], "b": [20.0, 24.0, 22.0]}
    record = records.group("g", "images/s", samples, {"a": {"level": "00"}}, [("a", "b")], notes=["N."])
    known = info(record, "a")
    assert known["images/s"] == 11
    assert known["level"] == "00"
    assert [(pair["to"], pair["median"]) for pair in known["pairs"]] == [("b", 0.5)]
    assert info(record, "b")["pairs"] == []


def test_rows_that_were_not_selected_are_no_pairs():
    record = records.group("g", "s", {"a": [1.0]}, ratios=[("a", "b"), ("b", "a")], differences=[("b", "c")])
    assert record["pairs"] == []
