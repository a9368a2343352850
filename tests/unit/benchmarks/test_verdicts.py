"""A promise counts as kept only where results say so, and the line names what broke it."""

import pytest

from benchmarks.report.publish import exit_code
from benchmarks.report.verdicts import memory_source, peaks, verdicts


def _lines(report: dict) -> list[str]:
    return [verdict.line for verdict in verdicts(report)]


def test_kept_promises_are_told_with_their_numbers(report):
    assert _lines(report) == [
        "IN STEP: five levels, max |Δw| = 3.0e-13",
        "EXACT: 10000 of 10000 samples on 1, 2 and 3 ranks",
        "BALANCED: fullest device over emptiest: DDP 1.00, DataParallel 2.00",
    ]
    assert exit_code(report) == 0


@pytest.mark.parametrize("far", [2e-4, float("inf"), float("nan")])
def test_weights_that_leave_the_others_break_the_first_promise(report, far):
    report["levels"]["03_accelerate"]["max_weight_difference"] = far
    assert _lines(report)[0] == f"OUT OF STEP: 03_accelerate with |Δw| = {far:.1e}"
    assert exit_code(report) == 1


def test_padded_samples_break_the_second_promise(report):
    report["levels"]["02_ddp_raw"]["evaluated_on"]["3"] = 10_002
    assert _lines(report)[1] == "INEXACT: 02_ddp_raw counts 10002 of 10000 samples on 3 ranks"
    assert exit_code(report) == 1


def test_dropped_samples_in_a_run_break_it_too(report):
    report["levels"]["04_trainer"]["run"]["evaluated"] = 9_984
    assert _lines(report)[1] == "INEXACT: 04_trainer counts 9984 of 10000 samples on 2 ranks"


def test_a_rank_that_holds_more_breaks_the_third_promise(report):
    report["levels"]["04_trainer"]["simulated_peak_memory"][0] = {"temporaries": 60 * 2**20}
    assert _lines(report)[2] == "UNBALANCED: fullest device over emptiest: DDP 1.50, DataParallel 2.00 (at 04_trainer)"
    assert exit_code(report) == 1


def test_a_rank_that_held_nothing_breaks_it_too(report):
    report["levels"]["02_ddp_raw"]["run"]["peak_memory_bytes"] = [400, 0]
    assert _lines(report)[2].startswith("UNBALANCED: fullest device over emptiest: DDP inf")


def test_measured_memory_counts_before_simulated(report):
    report["levels"]["02_ddp_raw"]["run"]["peak_memory_bytes"] = [400, 200]
    assert _lines(report)[2].startswith("UNBALANCED: fullest device over emptiest: DDP 2.00")


def test_where_memory_comes_from_is_told_level_by_level(report):
    """On one GPU the allocator knows every process, but not the replicas of level 01 apart."""
    levels = report["levels"]
    assert memory_source(levels) == "simulated, each tensor charged to its device"
    for result in levels.values():
        result["run"]["peak_memory_bytes"] = [2**20] * result["run"]["world_size"]
    assert memory_source(levels) == "measured by CUDA's allocator"
    levels["01_data_parallel"]["run"]["peak_memory_bytes"] = [2**20]
    assert peaks(levels["01_data_parallel"]) == [40 * 2**20, 20 * 2**20]
    assert memory_source(levels) == "measured by CUDA's allocator, that of 01_data_parallel simulated"
    levels["01_data_parallel"] = {}
    assert memory_source(levels) == "measured by CUDA's allocator"


def test_replicas_that_were_charged_to_one_gpu_are_not_balanced(report):
    """One number for two replicas is even with itself."""
    level = report["levels"]["01_data_parallel"]
    level["run"]["peak_memory_bytes"] = [60 * 2**20]
    level["simulated_peak_memory"] = level["simulated_peak_memory"][:1]
    verdict = verdicts(report)[2]
    assert (verdict.kept, verdict.line) == (None, "BALANCED? no memory of 01_data_parallel")


@pytest.mark.parametrize(
    "index, key, line",
    [
        (0, "max_weight_difference", "IN STEP? no weights of 02_ddp_raw"),
        (1, "evaluated_on", "EXACT? no evaluation of 02_ddp_raw"),
        (1, "run", "EXACT? no evaluation of 02_ddp_raw"),
        (2, "simulated_peak_memory", "BALANCED? no memory of 02_ddp_raw"),
    ],
)
def test_what_was_not_checked_is_not_kept(report, index, key, line):
    del report["levels"]["02_ddp_raw"][key]
    verdict = verdicts(report)[index]
    assert (verdict.kept, verdict.line) == (None, line)
    assert exit_code(report) == 1


def test_the_exit_code_tells_an_interruption_from_a_failure(report):
    assert exit_code(report | {"interrupted": True}) == 130
    assert exit_code(report | {"failures": [{"part": "memory", "level": None, "message": ""}]}) == 1
