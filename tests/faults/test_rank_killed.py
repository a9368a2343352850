"""A job with a killed rank restarts and ends with the same bits. The ranks of a killed torchrun end, too."""

import os
import signal
from pathlib import Path

import pytest
import torch

from common.launch import free_port
from common.weights import max_weight_difference
from tests.jobs import ON_LINUX, job, launcher, newest_checkpoint, resumed_at, run_to_end, script, torchrun
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
def test_ranks_end_with_a_torchrun_that_is_killed():
    """A killed torchrun sends no signal; on Linux the kernel ends its ranks."""
    with job(torchrun(script("02_ddp_raw"), *TRAINING, "--epochs", "1000")) as run:
        run.wait_for(lambda: "2 × gloo" in run.out)
        run.processes[0].kill()
        assert run.end(60) == [-signal.SIGKILL]


@pytest.mark.long
def test_ranks_with_checkpoints_save_before_they_end_with_a_torchrun_that_is_killed(tmp_path):
    """The signal of the kernel is SIGTERM, at which such a job always saves."""
    with job(torchrun(script(FULL), *TRAINING, "--epochs", "1000", *checkpointing(tmp_path))) as run:
        run.wait_for(lambda: newest_checkpoint(tmp_path) >= 10)
        run.processes[0].kill()
        assert run.end(60) == [-signal.SIGKILL]
        assert "stopped at step" in run.out, run.err


@pytest.mark.long
def test_a_job_grows_by_a_machine(tmp_path):
    """A change of membership: torchrun stops the healthy ranks and starts them anew, more of them this time.

    torch 2.15's agents share a store and tell its address only once: without the variable a newcomer waits in vain.
    """
    renewed = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    exact = [*TWO_EPOCHS, "--no-dropout", "--dtype", "float64"]
    flags = [*exact, *checkpointing(tmp_path), "--save", str(tmp_path / "grown.pt")]
    rendezvous = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-id", "grows", "--local-addr", "127.0.0.1"]
    rendezvous += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-conf", "last_call_timeout=1"]
    command = torchrun(script(FULL), *flags, processes=1, rendezvous=rendezvous)
    with job(command, **renewed) as first:
        first.wait_for(lambda: newest_checkpoint(tmp_path) >= 10)
        with job(command, **renewed) as second:
            assert first.end() == [0], first.err + second.err
            assert second.end() == [0], second.err
            assert f"{FULL}: 2 × gloo" in first.out + second.out
            assert resumed_at(first.out + second.out)
    done = run_to_end(torchrun(script("03_accelerate"), *exact, "--save", str(tmp_path / "w.pt"), processes=1))
    assert done.returncode == 0, done.stderr
    ends = [torch.load(tmp_path / name, weights_only=True) for name in ("grown.pt", "w.pt")]
    # Two processes add up in another order than one. With equal bits the job would not have grown.
    assert 0 < max_weight_difference(*ends) <= 1e-9
