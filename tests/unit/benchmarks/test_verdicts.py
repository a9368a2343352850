"""A comparison in the terminal: a promise is kept only where results say so, and the line names what broke it."""

import math

import pytest

from benchmarks.report.cells import are_measured, peaks
from benchmarks.report.comparison_table import summary, tables
from benchmarks.report.verdicts import balanced, verdicts
from common import ladder

MIB = 2**20


def test_kept_promises_are_shown_with_their_numbers(report):
    results = verdicts(report)
    assert all(verdict.kept for verdict in results)
    compared = report["levels"] | report["sharded"]
    largest = max(result["max_weight_difference"] for result in compared.values())
    first, second = peaks(report["levels"])["01_data_parallel"]
    numbers = (f"{largest:.1e}", "10000 of 10000", f"DataParallel {first / second:.2f}")
    for verdict, number in zip(results, numbers, strict=True):
        assert number in verdict.line


PROMISES = ("weights", "evaluation", "memory")
BREAKS = [
    ("weights", "03_accelerate", "max_weight_difference", 2e-4),
    ("weights", "03_accelerate", "max_weight_difference", math.inf),
    ("weights", "03_accelerate", "max_weight_difference", math.nan),
    ("evaluation", "02_ddp_raw", "evaluated_on", {"3": 10_002}),  # padded samples
    ("evaluation", "04_trainer", "evaluated_on", {"3": 9_984}),  # dropped ones
    ("memory", "04_trainer", "simulated_peak_memory", [{"temporaries": 60 * MIB}, {"temporaries": 40 * MIB}]),
]


@pytest.mark.parametrize("promise, level, key, value", BREAKS)
def test_a_broken_promise_names_its_level(report, promise, level, key, value):
    report["levels"][level][key] = value
    verdict = verdicts(report)[PROMISES.index(promise)]
    assert not verdict.kept and level in verdict.line


def test_a_sample_that_all_levels_drop_is_inexact(report):
    for result in report["levels"].values():
        result["run"]["evaluated"] = 9_999
        result["evaluated_on"] = {"3": 9_999}
    assert not verdicts(report)[1].kept


def test_a_run_on_as_many_ranks_as_the_second_evaluation_counts_too(report):
    run = report["levels"]["02_ddp_raw"]["run"]
    run |= {"world_size": 3, "evaluated": 10_002}
    verdict = verdicts(report)[1]
    assert not verdict.kept and "02_ddp_raw counts 10002 of 10000 samples on 3" in verdict.line


def test_what_is_beside_level_02_has_a_row_and_must_be_in_step(report):
    for result in report["sharded"].values():
        result |= {"weight_checksum": "abc", "simulated_peak_memory": [{"parameters": 30 * MIB}] * 2}
    assert "IN STEP: 5 levels, 02 fsdp, 02 mesh, max" in summary(report)
    rows = [line.split() for line in tables(report).splitlines() if line.startswith("02 ")]
    assert rows == [["02", name, "2", "–", "–", "30", "30", "abc"] for name in ("fsdp", "mesh")]
    report["sharded"][ladder.MESH]["max_weight_difference"] = 1e-3
    assert f"OUT OF STEP: {ladder.MESH}" in summary(report)


def test_measured_memory_counts_where_every_device_of_every_level_was_measured(report):
    """On one GPU the allocator knows every process, but not the replicas of level 01 apart."""
    levels = report["levels"]
    simulated = peaks(levels)["01_data_parallel"]
    assert not are_measured(levels) and "simulated MiB" in tables(report)
    for result in levels.values():
        result["run"]["peak_memory_bytes"] = [MIB] * result["run"]["world_size"]
    levels["02_ddp_raw"]["run"]["peak_memory_bytes"] = [400 * MIB, 200 * MIB]
    assert peaks(levels)["02_ddp_raw"] == [400 * MIB, 200 * MIB] and "measured MiB" in tables(report)
    assert not balanced(levels).kept
    levels["01_data_parallel"]["run"]["peak_memory_bytes"] = [MIB]
    assert peaks(levels)["01_data_parallel"] == simulated
    assert balanced(levels).kept


def test_the_terminal_has_80_columns(report):
    report |= {"steps": 1_000_000, "global_batch_size": 1_000_000, "world_size": 8}
    row = report["throughput"][0]["rows"]["02_ddp_raw, 2 processes"]
    row |= {"spread": 0.31, "noisy": True}
    report["levels"]["00_single_gpu"]["run"]["dataset"] = "synthetic"
    lines = summary(report).splitlines()
    assert max(map(len, lines)) <= 80 and any("NOT MNIST" in line for line in lines)
    assert any(" ".join(line.split()).startswith(f"02_ddp_raw 2 {row['median']:.0f} 31% noisy") for line in lines)


def test_speeds_are_held_against_one_device_and_all_cores_stand_apart(report):
    speeds, *_, computed = tables(report).split("\n\n")
    title, _, *rows = speeds.splitlines()
    assert "1 core for each device" in title
    names = [row.split("  ")[0] for row in rows]
    assert names == [*ladder.LEVELS, "00_single_gpu, all cores"]
    assert "all cores" not in computed
