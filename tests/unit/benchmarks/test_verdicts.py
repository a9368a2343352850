"""A comparison in the terminal: a promise is kept only where results say so, and the line names what broke it."""

import math

import pytest

from benchmarks.report.table import summary, tables, where_time_goes
from benchmarks.report.verdicts import are_measured, balanced, exact, exit_code, in_step, peaks
from common import ladder

MIB = 2**20


def test_kept_promises_are_told_with_their_numbers(report):
    verdicts = [check(report["levels"]) for check in (in_step, exact, balanced)]
    assert [verdict.kept for verdict in verdicts] == [True] * 3
    farthest = max(result["max_weight_difference"] for result in report["levels"].values())
    first, second = peaks(report["levels"])["01_data_parallel"]
    numbers = (f"{farthest:.1e}", "10000 of 10000", f"DataParallel {first / second:.2f}")
    for verdict, number in zip(verdicts, numbers, strict=True):
        assert number in verdict.line
    assert exit_code(report) == 0


BREAKS = [
    (in_step, "03_accelerate", "max_weight_difference", 2e-4),
    (in_step, "03_accelerate", "max_weight_difference", math.inf),
    (in_step, "03_accelerate", "max_weight_difference", math.nan),
    (exact, "02_ddp_raw", "evaluated_on", {"3": 10_002}),  # padded samples
    (exact, "04_trainer", "run", {"world_size": 2, "evaluated": 9_984}),  # dropped ones
    (balanced, "04_trainer", "simulated_peak_memory", [{"temporaries": 60 * MIB}, {"temporaries": 40 * MIB}]),
    (balanced, "04_trainer", "simulated_peak_memory", [{"temporaries": MIB}, {"temporaries": 0}]),
]


@pytest.mark.parametrize("check, level, key, value", BREAKS)
def test_a_broken_promise_names_its_level(report, check, level, key, value):
    report["levels"][level][key] = value
    verdict = check(report["levels"])
    assert verdict.kept is False and level in verdict.line
    assert exit_code(report) == 1


def test_what_is_beside_level_02_has_a_row_and_must_be_in_step(report):
    for rung in ladder.SHARDED:
        split = [{"parameters": 30 * MIB}] * 2
        report["sharded"] = report.get("sharded", {}) | {
            rung: {"max_weight_difference": 1e-14, "weight_checksum": "abc", "simulated_peak_memory": split}
        }
    assert "IN STEP: 5 levels, 02 fsdp, 02 mesh, max" in summary(report)
    rows = [line.split() for line in tables(report).splitlines() if line.startswith("02 ")]
    assert rows == [["02", name, "2", "–", "–", "30", "30", "abc"] for name in ("fsdp", "mesh")]
    report["sharded"][ladder.MESH]["max_weight_difference"] = 1e-3
    assert f"OUT OF STEP: {ladder.MESH}" in summary(report) and exit_code(report) == 1


@pytest.mark.parametrize(
    "check, key",
    [
        (in_step, "max_weight_difference"),
        (exact, "evaluated_on"),
        (exact, "run"),
        (balanced, "simulated_peak_memory"),
    ],
)
def test_what_was_not_checked_is_not_kept(report, check, key):
    del report["levels"]["02_ddp_raw"][key]
    verdict = check(report["levels"])
    assert verdict.kept is None and verdict.line.endswith("of 02_ddp_raw")
    assert exit_code(report) == 1


def test_measured_memory_counts_where_every_device_of_every_level_was_measured(report):
    """On one GPU the allocator knows every process, but not the replicas of level 01 apart."""
    levels = report["levels"]
    simulated = peaks(levels)["01_data_parallel"]
    assert not are_measured(levels) and "simulated MiB" in tables(report)
    for result in levels.values():
        result["run"]["peak_memory_bytes"] = [MIB] * result["run"]["world_size"]
    levels["02_ddp_raw"]["run"]["peak_memory_bytes"] = [400 * MIB, 200 * MIB]
    assert peaks(levels)["02_ddp_raw"] == [400 * MIB, 200 * MIB] and "measured MiB" in tables(report)
    assert balanced(levels).kept is False
    levels["01_data_parallel"]["run"]["peak_memory_bytes"] = [MIB]
    assert peaks(levels)["01_data_parallel"] == simulated
    assert balanced(levels).kept is True


def test_the_terminal_has_80_columns(report):
    report |= {"steps": 1_000_000, "global_batch_size": 1_000_000, "world_size": 8}
    row = report["throughput"][0]["rows"]["02_ddp_raw, 2 processes"]
    row |= {"spread": 0.31, "noisy": True}
    report["levels"]["00_single_gpu"]["run"]["dataset"] = "synthetic"
    lines = summary(report).splitlines()
    assert max(map(len, lines)) <= 80 and any("NOT MNIST" in line for line in lines)
    assert any(" ".join(line.split()).startswith(f"02_ddp_raw 2 {row['median']:.0f} 31% noisy") for line in lines)


def test_where_the_time_of_a_step_goes_is_said_where_it_was_measured(report):
    rows = report["throughput"][0]["rows"]
    # On a device of its own: 64 / 800 s for the whole batch, 32 / 640 s for a half. 64 / 1000 s for two devices.
    speeds = {"00_single_gpu": 800.0, "00_single_gpu, a share of 32": 640.0, "02_ddp_raw, 2 processes": 1000.0}
    for name, speed in speeds.items():
        rows[name]["median"] = speed
    (line,) = where_time_goes(rows)
    assert all(number in line for number in ("80.0 ms", "64.0 on 2", "50.0 for one share", "14.0 for working"))
    for missing in speeds:
        assert where_time_goes({name: row for name, row in rows.items() if name != missing}) == []


def test_speeds_are_held_against_one_device_and_all_cores_stand_apart(report):
    speeds, *_, computed = tables(report).split("\n\n")
    title, _, *rows = speeds.splitlines()
    assert "1 core for each device" in title
    names = [row.split("  ")[0] for row in rows]
    assert names == [*ladder.levels(), "00_single_gpu, all cores"]  # and no share of a batch
    assert "all cores" not in computed


def test_what_is_missing_is_a_dash_and_what_failed_is_named_with_its_message(report):
    report["levels"]["03_accelerate"] = {}
    failure = {"part": "training 03_accelerate", "level": "03_accelerate", "message": "rank 1: KeyError: <'x'>"}
    failed = report | {"throughput": [], "failures": [failure]}
    assert exit_code(failed) == 1 and exit_code(failed | {"interrupted": True}) == 130
    printed = summary(failed | {"interrupted": True})
    (line,) = [line for line in printed.splitlines() if line.startswith("03_accelerate")]
    assert line.split() == ["03_accelerate", *"–" * 5]
    assert "FAILED: training 03_accelerate" in printed and failure["message"] in printed
    assert "INTERRUPTED" in printed
