"""Instruments: steps and seconds counted right, one line for the plan and one for the result, whatever the level."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from tqdm import tqdm

from common import ladder
from common.args import parse_args
from common.data import DigitImages
from common.errors import UserError
from common.instruments.clock import Clock
from common.instruments.result import Hardware, plan_line
from common.settings import fit_to_machine
from tests.levels import FULL, run_level

CPU = torch.device("cpu")
NO_BAR = tqdm(disable=True)
SMALL = ["--dataset", "synthetic", "--train-samples", "64", "--eval-samples", "100"]


@pytest.fixture
def let_pass(monkeypatch):
    """`let_pass(seconds)` on a clock that nothing else moves."""
    now = [0.0]
    monkeypatch.setattr("common.instruments.clock.time", SimpleNamespace(perf_counter=lambda: now[0]))

    def let_pass(seconds: float) -> None:
        now[0] += seconds

    return let_pass


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("skipped", [(), (0, 4, 9)], ids=["every step", "as fp16 skips steps"])
def test_the_clock_runs_in_training_and_counts_skipped_steps(accumulation, skipped, let_pass):
    """Two epochs of five steps. A micro-batch takes 2 s until its forward and 1 s after, the optimizer's step 4 s."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Clock(model, CPU, steps_per_epoch=5, accumulation=accumulation, warm_up_steps=2, bar=NO_BAR) as clock:
        for step in range(10):
            model.train()
            for _ in range(accumulation):
                let_pass(2)
                model(torch.ones(1, 1)).sum().backward()
                let_pass(1)
            let_pass(4)
            if step not in skipped:
                optimizer.step()
            if step % 5 == 4:
                if step not in skipped:
                    let_pass(1000)  # after an epoch's last step the clock stands
                model.eval()
                model(torch.ones(1, 1))
                let_pass(1000)
    assert clock.steps == 10
    before_the_first_forwards = 2 * 2
    assert clock.seconds == 10 * (3 * accumulation + 4) - before_the_first_forwards
    assert clock.warm_up_seconds == 2 * (3 * accumulation + 4)  # It lasts from forward to forward.
    model.train()
    model(torch.ones(1, 1))
    optimizer.step()
    assert clock.steps == 10  # its hooks are gone


def test_in_a_resumed_run_the_clock_stops_between_epochs_only(let_pass):
    """The first epoch has two steps left, the second all of its five."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Clock(model, CPU, steps_per_epoch=5, accumulation=1, warm_up_steps=0, bar=NO_BAR) as clock:
        for steps in (2, 5):
            model.train()
            for _ in range(steps):
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()
                let_pass(1)
            model.eval()
            model(torch.ones(1, 1))
    assert clock.seconds == 2 + 4  # Nothing counts after the last step of the whole epoch.


@pytest.mark.parametrize(
    "level, flags, backend, world_size, part",
    [
        ("00_single_gpu", "--dtype float64", None, 1, "2 threads, float64 | synthetic 640 + 100 | batch 64 |"),
        ("01_data_parallel", "--replicas 3", "Emulated", 3, "on cpu, 3 threads each, float32 | synthetic 640"),
        ("01_data_parallel", "--replicas 3", "Emulated", 3, "batch 64 = 22 + 22 + 20 | 10 steps"),
        ("03_accelerate", "", "gloo", 2, "2 × gloo on cpu, 2 threads each, float32 |"),
        (FULL, "--batch-size 48 --gradient-accumulation-steps 2", "gloo", 2, "48 = 2 × 12 × 2 micro-batches |"),
    ],
)
def test_the_plan_says_on_what_is_computed(level, flags, backend, world_size, part, monkeypatch):
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    monkeypatch.setattr("common.cores.available_cores", lambda: 9)
    args = fit_to_machine(parse_args(str(ladder.script(level)), flags.split()))
    train_set, test_set = (DigitImages("synthetic", torch.zeros(n, 28, 28), torch.zeros(n)) for n in (640, 100))
    plan = plan_line(args, Hardware("cpu", backend, world_size), train_set, test_set, 10)
    assert "\n" not in plan and part in plan


def test_the_result_has_the_keys_of_the_contract(monkeypatch):
    seconds = itertools.count()
    monkeypatch.setattr("common.instruments.clock.time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    monkeypatch.setattr("sys.stderr", None)  # Python has none where no console is. Then there is no bar.
    result, _ = run_level("00_single_gpu", [*SMALL, "--warm-up-steps", "0"])
    assert list(result) == [
        "level", "dataset", "device", "backend", "world_size", "global_batch_size", "epochs", "steps", "seed",
        "loss", "eval_loss", "accuracy", "evaluated", "images_per_sec", "seconds", "peak_memory_bytes", "memory_source",
    ]  # fmt: skip
    assert (result["steps"], result["evaluated"], result["world_size"]) == (1, 100, 1)
    assert (result["images_per_sec"], result["seconds"]) == (64, 1)  # One step lies between two readings.


@pytest.mark.parametrize("level", ["00_single_gpu", "04_trainer"])
def test_a_training_whose_loss_is_lost_ends_in_one_line(level, tmp_path, capsys):
    """After the first step the weights are huge, and the second loss is not a number."""
    with pytest.raises(UserError, match=r"loss is not finite \(nan\) after step 3"):
        run_level(level, [*SMALL, "--train-samples", "192", "--lr", "1e30", "--json", str(tmp_path / "r.json")])
    assert not (tmp_path / "r.json").exists()


def test_the_result_of_each_epoch_is_a_line(capsys):
    run_level("00_single_gpu", [*SMALL, "--epochs", "2"])
    results = [line for line in capsys.readouterr().out.splitlines() if "eval loss" in line]
    assert [line.rpartition(" | ")[2].partition(" in ")[0] for line in results] == ["1 step", "2 steps"]
