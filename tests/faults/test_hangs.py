"""A job whose rank fails, dies or does something else than the others ends soon, and says which rank and why."""

import re
from collections.abc import Callable
from typing import NamedTuple

import pytest

from common import ladder
from common.processes import RankFailed, ranks
from tests.faults import fault_injection
from tests.jobs import ON_LINUX, launcher, run_all_to_end, torchrun
from tests.levels import SHORT

TIMEOUT = 12  # Seconds. The slowest rank may come that late to the first collective.
TRAINING = ["--dataset", "synthetic", "--train-samples", "3200", "--eval-samples", "320", "--batch-size", "32"]
TRAINING += ["--epochs", "90", "--timeout", str(TIMEOUT)]

# torchrun says "rank : 1 (local_rank: 1)", and below it "exitcode : -9 (pid: 4711) (SIGKILL)".
KILLED = (r"rank +: 1 \(local_rank: 1\)\s+exitcode +: -9 ", "SIGKILL")
# Rank 0 says in which operation it has waited: "[rank0]:     loss.backward()". Below it stands the reason:
# "[rank0]: RuntimeError: […] Timed out waiting 12000ms for recv operation to complete"
IN_BACKWARD = r"\[rank0\]: +(loss|accelerator|self\.accelerator)\.backward\("
TIMED_OUT = (IN_BACKWARD, f"Timed out waiting {TIMEOUT}000ms")
# "[rank0]: RuntimeError: […/pair.cc:538] Connection closed by peer"
LOST = r"\[rank0\]: RuntimeError: .*(Timed out waiting|Connection closed|reset by peer)"
# gloo may also abort the other rank, which got what it did not ask for. torchrun then names that rank and its signal.
LOST_OR_ABORTED = (rf"{IN_BACKWARD}|rank +: 1 .*\s+exitcode +: -6 ", f"{LOST}|SIGABRT")


class Case(NamedTuple):
    """A job, the fault of its last rank, and patterns that stderr must have in the end, each in some line."""

    level: str
    start: Callable[..., list[str]]
    fault: str
    patterns: tuple[str, str]


CASES = [
    Case("04_trainer/train_full", launcher, "kill", KILLED),
    Case("02_ddp_raw", torchrun, "hang", TIMED_OUT),
    Case("04_trainer", torchrun, "hang", TIMED_OUT),
    Case("02_ddp_raw", torchrun, "end_loaders", LOST_OR_ABORTED),
]


@ON_LINUX
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_job_ends_and_says_which_rank_and_why():
    """The jobs mostly wait, so they run at the same time. A rank that raises: `tests/docs/test_failures.py`."""
    commands = {case: case.start(fault_injection.__file__, case.fault, "5", case.level, *TRAINING) for case in CASES}
    for case, done in run_all_to_end(commands).items():
        assert done.returncode != 0, case
        assert f"{case.level}: 2 × gloo" in done.stdout and "synthetic accuracy" not in done.stdout, case
        for pattern in case.patterns:
            assert re.search(pattern, done.stderr), (case, done.stderr)


@pytest.mark.slow
def test_a_mesh_waits_no_longer_than_the_timeout():
    """torch gives a mesh's groups its default, of 30 minutes: that of the lesson's own group is not theirs."""
    flags = [*SHORT, "--tensor", "2", "--timeout", "5"]
    with pytest.raises(RankFailed, match="Timed out"):
        ranks(4).run(fault_injection.train, "hang", 1, ladder.MESH, flags)
