"""The report in the terminal."""

import pytest

from benchmarks.report.publish import publish
from benchmarks.report.table import heading, notes, table
from common import ladder
from tests.unit.benchmarks.conftest import ALL_CORES, SHARE


@pytest.mark.parametrize("steps", [6, 60, 937, 1_000_000])
def test_the_terminal_has_80_columns(report, steps):
    report |= {"steps": steps, "global_batch_size": steps, "world_size": 8}
    for text in (heading(report), table(report), notes(report)):
        assert all(len(line) <= 80 for line in text.splitlines()), text
    lines = table(report).splitlines()
    assert "01_data_parallel               2          855      1%        0.94 (0.94 to 0.95)" in lines
    assert "01_data_parallel         1    95.00%     10000            40 20         0badcafe" in lines


def test_what_is_missing_is_a_dash(report):
    report["levels"]["03_accelerate"] = {}
    report["throughput"] = []
    (line,) = [line for line in table(report).splitlines() if line.startswith("03_accelerate")]
    assert line.split() == ["03_accelerate", *"–" * 5]


def test_speeds_are_held_against_one_device_and_all_cores_stand_apart(report):
    speeds, _, computed = table(report).partition("\n\n")
    title, headings, *rows = speeds.splitlines()
    assert title == "Speed at global batch 64, 1 core for each device" and "of level 00 on one device" in headings
    cells = {row.split("  ")[0]: row.split() for row in rows}
    assert list(cells) == [*ladder.levels(), "00_single_gpu, all cores"]  # and no share of a batch
    assert cells["00_single_gpu"][1:] == ["1", "905", "1%", "1"]
    assert cells["00_single_gpu, all cores"][3:6] == ["–", "1305", "0%"]
    assert "all cores" not in computed


def test_speeds_of_undivided_cores_are_held_against_level_00(report, tmp_path, coarse):
    del report["cores_per_device"]
    (group,) = report["throughput"]
    for name in [ALL_CORES, SHARE]:
        del group["rows"][name]
    group["pairs"] = [pair for pair in group["pairs"] if pair["of"] != ALL_CORES]
    for row in group["rows"].values():
        for fact in ("workers", "cores_per_device", "apart"):
            del row[fact]
    printed = publish(report, tmp_path)
    assert "of level 00 on one device" not in printed and "Speed at global batch 64\n" in printed


def test_a_noisy_row_is_marked(report):
    rows = report["throughput"][0]["rows"]
    rows["02_ddp_raw"] |= {"spread": 0.31, "noisy": True}
    assert "31%*" in table(report) and "*: noisy." in notes(report)


def test_an_interrupted_run_says_what_it_lacks(report, tmp_path, coarse):
    del report["memory"], report["levels"]["04_trainer"]["run"]
    printed = publish(report | {"complete": False, "interrupted": True}, tmp_path)
    assert "INTERRUPTED" in printed and "memory.png was not drawn" in printed
    assert "EXACT? no evaluation of 04_trainer" in printed


def test_a_failure_is_shown_with_its_message(report, tmp_path, coarse):
    failure = {"part": "training 03_accelerate", "level": "03_accelerate", "message": "rank 1: KeyError: <'x'>"}
    printed = publish(report | {"complete": False, "failures": [failure]}, tmp_path)
    assert "FAILED: training 03_accelerate" in printed and "rank 1: KeyError: <'x'>" in printed
