"""Each level started as its user starts it: a plan, a result, exact evaluation, and errors said once."""

import json

import pytest
import torch

from common import ladder
from common.model import BasicNet
from tests.jobs import level_command, run_to_end

QUICK = ["--max-steps", "3", "--eval-samples", "500"]
SLOW = pytest.mark.slow
LONG = pytest.mark.long


@pytest.mark.parametrize(
    "level, processes",
    [
        pytest.param("01_data_parallel", None, marks=SLOW),
        pytest.param("02_ddp_raw", 2, marks=SLOW),
        pytest.param("03_accelerate", 2, marks=LONG),
        pytest.param("04_trainer", 2, marks=LONG),
    ],
)
def test_a_level_trains_saves_and_says_so(level, processes, tmp_path):
    """Level 00 is started below."""
    argv = [*QUICK, "--dataset", "synthetic", "--json", str(tmp_path / "r.json"), "--save", str(tmp_path / "w.pt")]
    done = run_to_end(level_command(level, *argv, processes=processes))
    assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr
    plan, *between, result_line = done.stdout.splitlines()
    assert not between or level == "04_trainer"  # A Trainer says more: its summary, its logs.
    assert plan.startswith(f"{level}: ") and "synthetic 192 + 500" in plan
    assert result_line.startswith(f"{level}: synthetic accuracy ")
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["level"], result["steps"], result["evaluated"]) == (level, 3, 500)
    assert result["world_size"] == 2
    weights = torch.load(tmp_path / "w.pt", weights_only=True)
    assert weights.keys() == BasicNet().state_dict().keys()


@SLOW
def test_a_batch_that_two_processes_cannot_share_is_one_line():
    done = run_to_end(level_command("02_ddp_raw", "--batch-size", "63", processes=2))
    assert done.returncode != 0 and done.stdout == ""
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert errors == ["error: --batch-size 63 is not divisible by 2 (2 processes): use 62 or 64"]


@pytest.mark.parametrize(
    "level, flags, steps, accuracy",
    [
        pytest.param("00_single_gpu", ["--max-steps", "94"], 94, 0.9, marks=SLOW),
        # After a full epoch a CPU's rounding decides whether it is 0.979 or 0.983.
        *(pytest.param(level, [], 937, 0.975, marks=LONG) for level in ladder.LEVELS),
    ],
)
def test_an_epoch_of_mnist_or_a_tenth_of_it_is_accurate(level, flags, steps, accuracy, mnist, tmp_path):
    processes = 2 if level in ladder.DISTRIBUTED else None
    argv = [*flags, "--data-dir", mnist, "--json", str(tmp_path / "r.json")]
    done = run_to_end(level_command(level, *argv, processes=processes), seconds=500)
    assert done.returncode == 0, done.stderr
    assert processes == 2 or done.stderr == ""  # torchrun writes there.
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["accuracy"] >= accuracy
    assert (result["dataset"], result["evaluated"], result["steps"]) == ("mnist", 10_000, steps)
