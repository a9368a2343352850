"""Records of benchmarks: small, complete, printable in 80 columns."""

import json
import re
import sys

import pytest

from benchmarks.harness import machine, records
from benchmarks.harness.records import Pair, read_group
from benchmarks.report.group_table import comparisons, held_memory, table
from common import ladder

# A file for each suite; results.json is a comparison's.
FILES = sorted(ladder.ROOT.glob("benchmarks/results/*/*.json"))
ONE, TWO = "01_data_parallel, 2 replicas", "02_ddp_raw, 2 processes"


def _record() -> dict:
    samples = {ONE: [1234.5678, 1200.0, 1300.0], TWO: [2000.0, 1000.0, 3000.0]}
    facts = {ONE: {"level": "01_data_parallel"}, TWO: {}}
    pairs = [Pair(ONE, TWO, "ratio"), Pair(TWO, ONE, "difference")]
    return records.group("a group", "images/s", samples, facts, pairs)


def test_a_record_holds_samples_summaries_facts_and_pairs_with_what_their_intervals_can_claim():
    record = _record()
    assert record["rows"][ONE] == {
        "median": 1234.6, "low": 1217.3, "high": 1267.3, "spread": 0.0405, "noisy": False,
        "samples": [1234.6, 1200.0, 1300.0], "level": "01_data_parallel",
    }  # fmt: skip
    assert record["rows"][TWO]["noisy"] and record["rounds"] == 3
    ratio, difference = record["pairs"]
    assert (ratio["of"], ratio["to"], ratio["kind"]) == (ONE, TWO, "ratio")
    assert ratio["median"] == 0.61728  # of 0.617, 1.2 and 0.433
    assert difference["kind"] == "difference" and difference["median"] == 765.43
    for pair in record["pairs"]:
        low, high = pair["interval"]
        assert low <= pair["median"] <= high and pair["confidence"] == 0.75


def test_ratios_have_no_unit_and_differences_on_a_slow_machine_no_exponent():
    ratio, difference = comparisons(read_group(_record())).splitlines()[-2:]
    assert ratio.endswith(f"{ONE} / {TWO} 0.617 (0.433 to 1.200)")
    assert difference.endswith("765.4 (-200.0 to 1700.0) images/s")
    samples = {"transformers.Trainer": [2400.0, 3100.0], "raw loop like a Trainer's": [1000.0, 1350.0]}
    pair = Pair(*samples, "difference")
    lines = comparisons(read_group(records.group("g", "µs", samples, pairs=[pair]))).splitlines()
    assert lines[-1].endswith("1575.0 (1400.0 to 1750.0) µs") and len(lines[-1]) <= 80


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_was_recorded_fits_into_80_columns_and_names_no_folder_of_the_machine(path):
    record = json.loads(path.read_text())
    for group in record.get("groups", []):
        assert all(len(line) <= 80 for line in table(read_group(group)).splitlines()), group["group"]
    texts = re.findall(r'"((?:[^"\\]|\\.)*)"', path.read_text())
    assert [text for text in texts if re.search(r"(^|\s)/\w", text)] == []


def test_the_command_is_what_a_user_types_without_the_folders_of_the_machine(monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["/v/bin/python3", "-m", "benchmarks", "--record", "/o/x", "--out=/o/y"])
    assert machine.run_metadata()["command"] == "python3 -m benchmarks --record x --out=y"


def test_held_memory_has_a_line_for_each_script():
    ranks = [{"parameters": 3 * 2**20, "gradients": 2**20}] * 4
    first, *others = held_memory({"DDP": ranks, "FSDP": ranks[:2]}).splitlines()
    assert first == "MiB that each rank holds"
    assert [line.split() for line in others] == [["DDP", "4", "3×4"], ["FSDP", "4", "4"]]
    assert all(len(line) == 79 for line in others)
