"""Each level started as its user starts it: a plan, a result, exact evaluation, and errors said once."""

import json

import pytest
import torch

from common import ladder
from tests.levels import run_script

QUICK = ["--max-steps", "3", "--eval-samples", "500"]
MARKS = {
    ("00_single_gpu", None): pytest.mark.slow,
    ("02_ddp_raw", 2): pytest.mark.slow,
    ("01_data_parallel", None): pytest.mark.slow,
    ("03_accelerate", 2): pytest.mark.slow,
    ("04_trainer", 2): pytest.mark.slow,
}
HOW = [
    pytest.param(level, processes, marks=MARKS.get((level, processes), pytest.mark.long))
    for level in ladder.levels()
    for processes in ((None, 2) if level in ladder.DISTRIBUTED else (None,))
]


@pytest.mark.parametrize("level, processes", HOW)
def test_a_level_trains_saves_and_says_so(level, processes, tmp_path):
    argv = [*QUICK, "--dataset", "synthetic", "--json", str(tmp_path / "r.json"), "--save", str(tmp_path / "w.pt")]
    done = run_script(level, argv, processes)
    assert done.returncode == 0, done.stderr
    plan, *between, result_line = done.stdout.splitlines()
    assert not between or level == "04_trainer"  # a Trainer says more: its summary, its logs, its table
    assert plan.startswith(f"{level}: ") and "synthetic 192 + 500" in plan
    assert result_line.startswith(f"{level}: synthetic accuracy ")
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["level"], result["steps"], result["evaluated"]) == (level, 3, 500)
    assert result["world_size"] == (processes or (2 if level == "01_data_parallel" else 1))
    weights = torch.load(tmp_path / "w.pt", weights_only=True)
    assert sum(weight.numel() for weight in weights.values()) == 1_199_882


@pytest.mark.slow
def test_a_batch_that_three_processes_cannot_share_is_one_line():
    done = run_script("02_ddp_raw", ["--batch-size", "64"], processes=3)
    assert done.returncode != 0 and done.stdout == ""
    said = [line for line in done.stderr.splitlines() if "does not divide" in line]
    assert said == ["error: --batch-size 64 does not divide by 3 (3 processes): use 63 or 66"]


@pytest.mark.slow
def test_a_quarter_of_an_epoch_of_mnist_is_95_percent_accurate(mnist, tmp_path):
    flags = ["--data-dir", mnist, "--max-steps", "234", "--json", str(tmp_path / "r.json")]
    done = run_script("00_single_gpu", flags, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "mnist 14976 + 10000" in done.stdout and done.stderr == ""
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["accuracy"] >= 0.95
    assert (result["dataset"], result["evaluated"], result["steps"]) == ("mnist", 10_000, 234)


@pytest.mark.long
@pytest.mark.parametrize("level", ladder.levels())
def test_a_full_epoch_of_mnist_is_98_percent_accurate(level, mnist, tmp_path):
    processes = 2 if level in ladder.DISTRIBUTED else None
    done = run_script(level, ["--data-dir", mnist, "--json", str(tmp_path / "r.json")], processes, timeout=500)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["accuracy"] >= 0.98
    assert (result["dataset"], result["evaluated"], result["steps"]) == ("mnist", 10_000, 937)
