"""What would hang, or train on with wrong numbers, is an error within --timeout that names rank and operation."""

import re

import pytest

from tests.faults.jobs import ON_LINUX, run_all_to_end, selected_cases, torchrun
from tests.faults.test_rank_killed import SABOTEUR

pytestmark = ON_LINUX

SHORT = ["--dataset", "synthetic", "--train-samples", "640", "--eval-samples", "320", "--batch-size", "32"]
FAULTS = ["hangs", "leaves_early", "has_fewer_batches", "bypasses_ddp", "reduces_alone"]
# They end as a rank with fewer batches does, and as one that reduces alone.
ALIKE = ["leaves_early", "bypasses_ddp"]
SLOW = pytest.mark.slow
LONG = pytest.mark.long
PLAIN = [
    *(pytest.param("02_ddp_raw", fault, marks=LONG if fault in ALIKE else SLOW) for fault in FAULTS),
    pytest.param("04_trainer", "hangs", marks=LONG),
]
TIMEOUT = 20  # seconds; the slowest rank may come that late to the first collective


@pytest.fixture(scope="module")
def endings(request) -> dict:
    """How each sabotaged job ended, by (start, level, fault). They mostly wait, so they run at the same time."""
    commands = {}
    for level, fault in selected_cases(request, ("level", "fault")):
        commands[level, fault] = torchrun(SABOTEUR, fault, "5", level, *SHORT, "--timeout", str(TIMEOUT))
    return run_all_to_end(commands)


def error_of(endings: dict, level: str, fault: str) -> str:
    """What the job said on stderr; it must have failed."""
    done = endings[level, fault]
    assert done.returncode != 0
    assert f"{level}: synthetic accuracy" not in done.stdout
    return done.stderr


@pytest.mark.timeout(900)
@pytest.mark.parametrize("level, fault", PLAIN)
def test_ranks_that_wait_for_one_that_does_something_else_end_with_the_operation_and_their_rank(level, fault, endings):
    """The other rank's operation may be another one at its own end: gloo aborts a process that gets what it did not ask
    for, and torchrun names its rank and signal."""
    said = error_of(endings, level, fault)
    waiting = re.search(r"^\[rank0\]: RuntimeError: .*(Timed out waiting|Connection closed|reset by peer)", said, re.M)
    operation = re.search(
        r"^\[rank0\]: +(loss\.backward|accelerator\.backward|self\.accelerator\.backward)\(", said, re.M
    )
    assert (waiting and operation) or re.search(r"rank +: 1 .*\n +exitcode +: -6 .*SIGABRT", said), said
    if fault == "hangs":
        assert f"Timed out waiting {TIMEOUT}000ms" in said
