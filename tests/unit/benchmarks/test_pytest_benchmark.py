"""`pytest benchmarks` as users of pytest-benchmark know it, on recorded durations: nothing is measured."""

import json
import os
from pathlib import Path

import pytest

from benchmarks.harness import records
from benchmarks.harness.groups import ReplayClock, info, seconds_per_step
from benchmarks.suites import throughput
from common import ladder
from tests.nested_pytest import run_pytest, run_sessions

SLOW = "03_accelerate, 2 processes"
ROUNDS = 10
BATCH = 64


def _folder(path: Path, slower: dict[str, float]) -> Path:
    """A record of strong scaling in which every row takes about 40 ms for a step, or so many times as long."""
    samples = {}
    facts = {}
    for configuration in throughput.strong_scaling(BATCH):
        seconds = [0.040 * slower.get(configuration.name, 1.0) * (1 + i % 3 / 100) for i in range(ROUNDS)]
        samples[configuration.name] = [BATCH / duration for duration in seconds]
        facts[configuration.name] = {"global_batch_size": BATCH, "level": configuration.level}
    title = throughput.STRONG_TITLE.format(BATCH)
    ratios = [(SLOW, "02_ddp_raw, 2 processes")]
    record = records.group(title, "images/s", samples, facts, ratios, notes=["A note."])
    path.mkdir()
    records.write(path / "throughput.json", "throughput", records.circumstances(), groups=[record])
    return path


SUITE_FILE = "benchmarks/suites/test_throughput.py"
COMPARED = ["--benchmark-compare", "--benchmark-compare-fail=median:10%"]
# What is refused before anything is measured, and what is then said.
REFUSED = {
    ("--rounds", "0"): "--rounds must be at least 1",
    ("--replay", "benchmarks", "--record", "b"): "--replay measures nothing",
    ("--replay", "no/such"): "--replay: there is no folder no/such",
    ("--record", "/proc/x"): "--record: nothing can be written to /proc/x",
}


@pytest.fixture(scope="module")
def sessions(tmp_path_factory) -> dict:
    """How `pytest benchmarks` has ended with each list of options, by a name or by the options that are refused."""
    folder = tmp_path_factory.mktemp("sessions")
    empty = folder / "empty"
    empty.mkdir()
    recorded = ["--replay", str(_folder(folder / "record", {}))]
    slowed = ["--replay", str(_folder(folder / "slowed", {SLOW: 1.2}))]
    stored = [f"--benchmark-storage=file://{folder / 'storage'}"]
    some_rows = ["-k", "strong-64 and 02_ddp_raw", f"--benchmark-json={folder / 'some_rows.json'}"]
    options = {
        "baseline": [*recorded, *stored, "--benchmark-autosave"],
        "some rows": [*recorded, *stored, *some_rows],
        "no option of the plugin": recorded,
        "compared with itself": [*recorded, *stored, *COMPARED],
        "compared with a slower one": [*slowed, *stored, *COMPARED],
        "nothing recorded": ["--replay", str(empty), "-rs"],
        **{flags: flags for flags in REFUSED},
    }
    ended = run_sessions([[SUITE_FILE, "-k", "strong-64", *own] for own in options.values()])
    return {"folder": folder} | dict(zip(options, ended, strict=True))


@pytest.mark.slow
def test_a_row_is_a_test_in_seconds_and_what_rows_are_to_one_another_stands_below(sessions):
    assert sessions["baseline"].returncode == 0, sessions["baseline"].stdout
    table, _, below = sessions["baseline"].stdout.partition("Legend:")
    assert f"benchmark '{throughput.STRONG_TITLE.format(BATCH)}': 11 tests" in table
    for words in ("images/s, medians of 10 rounds", f"{SLOW} / 02_ddp_raw, 2 processes", "A note."):
        assert words in below
    assert sessions["some rows"].returncode == 0, sessions["some rows"].stdout
    written = json.loads((sessions["folder"] / "some_rows.json").read_text())
    rows = {row["params"]["row"]: row for row in written["benchmarks"]}
    assert set(rows) == {"02_ddp_raw, 1 process", "02_ddp_raw, 2 processes"}
    for row in rows.values():
        assert row["stats"]["rounds"] == ROUNDS
        assert row["stats"]["median"] == pytest.approx(0.0404, rel=1e-4)
        assert row["extra_info"]["images/s"] == pytest.approx(BATCH / 0.0404, rel=1e-4)
        assert row["extra_info"]["level"] == "02_ddp_raw"


@pytest.mark.slow
def test_every_result_is_printed_once_unless_an_option_asks_for_the_plugins_table(sessions):
    done = sessions["no option of the plugin"]
    assert done.returncode == 0, done.stdout
    assert "images/s, medians of 10 rounds" in done.stdout and "Legend:" not in done.stdout


@pytest.mark.slow
def test_a_slow_down_of_a_fifth_fails_for_that_level_alone(sessions):
    same = sessions["compared with itself"]
    assert same.returncode == 0, same.stdout
    _, _, regressed = sessions["compared with a slower one"].stdout.partition("Performance has regressed:")
    (named,) = [line for line in regressed.splitlines() if "percentage" in line.lower() and "test_step" in line]
    assert SLOW in named


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "said"), REFUSED.items())
def test_options_that_make_no_sense_are_refused_before_anything_is_measured(flags, said, sessions):
    assert sessions[flags].returncode == 4
    assert said in sessions[flags].stdout


@pytest.mark.slow
def test_what_is_not_recorded_is_skipped_with_the_reason(sessions):
    done = sessions["nothing recorded"]
    assert done.returncode == 0, done.stdout
    assert "throughput.json does not exist" in done.stdout


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
    keep_memory([dict(title=TITLE, wrapper="DDP", devices=1, peaks=[{}], tensors=[], allocated=[1])])
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
