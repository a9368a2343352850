"""A job with a killed rank restarts and ends with the same bits. The ranks of a killed torchrun end, too."""

import os
import signal
from pathlib import Path

import pytest
import torch

from common.weights import max_weight_difference
from tests.jobs import ON_LINUX, job, launcher, newest_checkpoint, resumed_at, script, torchrun
from tests.levels import FULL, run_on_ranks

pytestmark = ON_LINUX

# 40 steps an epoch, with dropout: what is lost or drawn twice would be seen in the weights.
TRAINING = ["--dataset", "synthetic", "--train-samples", "1280", "--eval-samples", "100", "--batch-size", "32"]
TWO_EPOCHS = [*TRAINING, "--epochs", "2"]


def checkpointing(folder: Path) -> list[str]:
    return ["--checkpoint-dir", str(folder / "c"), "--checkpoint-every", "10"]


RESTARTS = [
    pytest.param(FULL, torchrun, 1, marks=pytest.mark.slow),
    pytest.param("04_trainer/train_full", launcher, 0, marks=pytest.mark.long),
]


@pytest.mark.parametrize("level, start, rank", RESTARTS)
def test_a_job_with_a_killed_rank_restarts_and_ends_with_the_same_bits(level, start, rank, tmp_path):
    weights = tmp_path / "w.pt"
    command = start(script(level), *TWO_EPOCHS, *checkpointing(tmp_path), "--save", str(weights), restarts=3)
    with job(command) as run:
        run.wait_for(lambda: newest_checkpoint(tmp_path) >= 10)
        os.kill(run.rank(rank), signal.SIGKILL)
        assert run.end() == [0], run.err
        plans = [line for line in run.out.splitlines() if line.startswith(f"{level}: 2 × gloo")]
        assert len(plans) == 2, "the second attempt is a start of its own"
        resumed = resumed_at(run.out)
        assert len(resumed) == 1 and 10 <= resumed[0] < 80 and resumed[0] % 10 == 0, run.out
    _, undisturbed = run_on_ranks(level, 2, TWO_EPOCHS)
    assert max_weight_difference(torch.load(weights, weights_only=True), undisturbed) == 0


@pytest.mark.slow
def test_ranks_with_checkpoints_save_before_they_end_with_a_torchrun_that_is_killed(tmp_path):
    """The signal of the kernel is SIGTERM, at which such a job always saves."""
    with job(torchrun(script(FULL), *TRAINING, "--epochs", "1000", *checkpointing(tmp_path))) as run:
        run.wait_for(lambda: newest_checkpoint(tmp_path) >= 10)
        run.processes[0].kill()
        assert run.end(60) == [-signal.SIGKILL]
        assert "stopped at step" in run.out, run.err
