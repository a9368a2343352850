"""A job whose rank fails, dies or does something else than the others ends soon, and says which rank and why."""

import re

import pytest

from common import ladder
from tests.faults.jobs import ON_LINUX, SABOTEUR, launcher, run_all_to_end, selected_cases, torchrun

pytestmark = ON_LINUX

TIMEOUT = 12  # seconds; the slowest rank may come that late to the first collective
# 90 epochs take longer than `run_to_end` waits.
TRAINING = ["--dataset", "synthetic", "--train-samples", "3200", "--eval-samples", "320", "--batch-size", "32"]
TRAINING += ["--epochs", "90", "--timeout", str(TIMEOUT)]

ITS_ERROR = r"\[rank1\]: ArithmeticError: the reason"
KILLED = r"rank +: 1 \(local_rank: 1\)\s+exitcode +: -9 \(pid: \d+\) +\(SIGKILL\)"

# Rank 0 says in which operation it has waited in vain. gloo may also abort the other rank, which got what it did not
# ask for; torchrun then names that rank and its signal.
OPERATION = r"(?s)\[rank0\]: +(loss|accelerator|self\.accelerator)\.backward\(.*"
VAIN = rf"{OPERATION}\[rank0\]: RuntimeError: .*(Timed out waiting|Connection closed|reset by peer)"
VAIN_OR_ABORTED = rf"{VAIN}|rank +: 1 .*\n +exitcode +: -6 .*SIGABRT"
TIMED_OUT = rf"{OPERATION}Timed out waiting {TIMEOUT}000ms"

SLOW = pytest.mark.slow
LONG = pytest.mark.long
CASES = [
    pytest.param("02_ddp_raw", torchrun, "raises", ITS_ERROR, marks=LONG),  # as the script of WHEN_IT_HANGS.md
    pytest.param(ladder.FULL, torchrun, "is_killed", KILLED, marks=LONG),
    pytest.param("04_trainer/train_full", launcher, "is_killed", KILLED, marks=SLOW),
    pytest.param("02_ddp_raw", torchrun, "hangs", TIMED_OUT, marks=SLOW),
    pytest.param("04_trainer", torchrun, "hangs", TIMED_OUT, marks=LONG),
    pytest.param("02_ddp_raw", torchrun, "has_fewer_batches", VAIN_OR_ABORTED, marks=SLOW),
]


@pytest.fixture(scope="module")
def endings(request) -> dict:
    """How each sabotaged job ended, by (level, start, fault). They mostly wait, so they run at the same time."""
    commands = {}
    for level, start, fault, _ in selected_cases(request, ("level", "start", "fault", "says")):
        commands[level, start, fault] = start(SABOTEUR, fault, "5", level, *TRAINING)
    return run_all_to_end(commands)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("level, start, fault, says", CASES)
def test_the_job_ends_and_says_which_rank_and_why(level, start, fault, says, endings):
    done = endings[level, start, fault]
    assert done.returncode != 0
    assert f"{level}: 2 × gloo" in done.stdout and "synthetic accuracy" not in done.stdout
    assert re.search(says, done.stderr), done.stderr
