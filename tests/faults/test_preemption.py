"""A run that gets a signal saves a checkpoint at a step that all ranks agree on; continued, it ends the same."""

import os
import re
import signal
from pathlib import Path

import pytest
import torch

from common.weights import max_weight_difference
from tests.jobs import ON_LINUX, Job, complete_checkpoints, job, level_command
from tests.levels import FULL, run_on_ranks

pytestmark = ON_LINUX

SETTINGS = ["--dataset", "synthetic", "--train-samples", "320", "--eval-samples", "100", "--batch-size", "16"]
SETTINGS += ["--checkpoint-every", "5", "--epochs"]  # An epoch has 20 steps.
TRAINER = "04_trainer/train_full"


def start(level: str, processes: int, *flags: str):
    """The level as a job. Its ranks have as many threads as in this process, because sums of others have other bits."""
    command = level_command(level, *SETTINGS, *flags, processes=None if processes == 1 else processes)
    return job(command, OMP_NUM_THREADS=str(max(1, torch.get_num_threads() // processes)))


def weights_after(level: str, processes: int, folder: Path, epochs: int) -> dict:
    """The weights of a training that goes on from what `folder` has, or begins."""
    return run_on_ranks(level, processes, [*SETTINGS, str(epochs), "--checkpoint-dir", str(folder)])[1]


def terminate_agent(run: Job) -> None:
    """Of a single process it is that one, of several torchrun."""
    run.processes[0].terminate()


def terminate_one_rank(run: Job) -> None:
    os.kill(run.rank(1), signal.SIGTERM)


def press_ctrl_c(run: Job) -> None:
    os.killpg(run.processes[0].pid, signal.SIGINT)


@pytest.mark.parametrize(
    "level, processes, send_signal, code",
    [
        pytest.param(FULL, 1, terminate_agent, 128 + signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(FULL, 2, press_ctrl_c, None, marks=pytest.mark.slow),
        pytest.param(FULL, 2, terminate_agent, None, marks=pytest.mark.long),
        pytest.param(TRAINER, 2, terminate_one_rank, None, marks=pytest.mark.long),
    ],
)
def test_after_a_signal_all_ranks_save_at_one_step(level, processes, send_signal, code, tmp_path):
    with start(level, processes, "1000", "--checkpoint-dir", str(tmp_path / "c")) as run:
        run.wait_for(lambda: complete_checkpoints(tmp_path))
        send_signal(run)
        (ended,) = run.end()
        assert ended != 0, run.err
        if code is not None:  # torchrun's own is 1, or that of its signal.
            assert ended == code, run.err
        (step,) = re.findall(r"^stopped at step (\d+): run it again to continue$", run.out, re.MULTILINE)
        evaluations = [line for line in run.out.splitlines() if "eval_loss " in line]
    if level == TRAINER:  # It prints a line for each whole epoch, and none for the one in which the signal came.
        assert len(evaluations) == (int(step) - 1) // 20
    epochs = int(step) // 20 + 2
    undisturbed = weights_after(level, processes, tmp_path / "undisturbed", epochs)
    assert max_weight_difference(weights_after(level, processes, tmp_path / "c", epochs), undisturbed) == 0


@pytest.mark.slow
def test_without_checkpoints_a_signal_ends_the_run_as_ever():
    with start(FULL, 1, "1000") as run:
        run.wait_for(lambda: run.out)  # It has printed the plan, and is about to train.
        run.processes[0].terminate()
        assert run.end() == [-signal.SIGTERM] and "stopped at" not in run.out
