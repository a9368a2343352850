"""What would hang, or train on with wrong numbers, is an error within --timeout that names rank and operation."""

import re

import pytest

from tests.faults.jobs import ON_LINUX, launcher, run_to_end, torchrun
from tests.faults.test_rank_killed import SABOTEUR

pytestmark = [ON_LINUX, pytest.mark.slow]

SHORT = ["--dataset", "synthetic", "--train-samples", "640", "--eval-samples", "320", "--batch-size", "32"]
ALL = ["hangs", "leaves_early", "has_fewer_batches", "bypasses_ddp", "reduces_alone"]
PLAIN = [*(("02_ddp_raw", fault) for fault in ALL), ("03_accelerate", "hangs"), ("04_trainer", "hangs")]
CHECKED = [*(("03_accelerate", fault) for fault in ALL if fault != "leaves_early"), ("04_trainer", "has_fewer_batches")]


def sabotaged(start, fault: str, level: str, *flags: str):
    done = run_to_end([*start(SABOTEUR, fault, "5", level, *SHORT, "--timeout", "10"), *flags])
    assert done.returncode != 0 and f"{level}: synthetic accuracy" not in done.stdout
    return done.stderr


@pytest.mark.parametrize("level, fault", PLAIN)
def test_ranks_that_wait_for_one_that_does_something_else_end_with_the_operation_and_their_rank(level, fault):
    """The other rank's operation may be another one at its own end: gloo aborts a process that gets what it did not ask
    for, and torchrun names its rank and signal."""
    said = sabotaged(torchrun, fault, level)
    waiting = re.search(r"^\[rank0\]: RuntimeError: .*(Timed out waiting|Connection closed|reset by peer)", said, re.M)
    operation = re.search(
        r"^\[rank0\]: +(loss\.backward|accelerator\.backward|self\.accelerator\.backward)\(", said, re.M
    )
    assert (waiting and operation) or re.search(r"rank +: 1 .*\n +exitcode +: -6 .*SIGABRT", said), said
    if fault == "hangs":
        assert "Timed out waiting 10000ms" in said


@pytest.mark.parametrize("level, fault", CHECKED)
def test_in_debug_mode_the_error_names_what_each_rank_was_doing(level, fault):
    """`launch --debug` compares the collectives of the ranks before they begin."""
    said = sabotaged(lambda *argv: launcher("--debug", *argv), fault, level)
    if fault == "hangs":
        assert "Ranks 1 failed to pass monitoredBarrier in 10000 ms" in said
    else:
        mismatch = r"Rank 0 is running collective: .*OpType=ALLREDUCE.*, but Rank 1 is running collective: .*OpType="
        assert re.search(mismatch, said), said
