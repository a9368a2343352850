"""Plan, throughput and result: counted right, said once."""

import contextlib
import io
import json
import os
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from common import ladder, report
from common.accelerator import PartialState
from common.args import parse_args
from common.errors import UserError
from common.model import BasicNet
from common.report import WARM_UP_STEPS, Meter, Run
from tests.workers import ranks

CPU = torch.device("cpu")


def a_run(argv=(), level="00_single_gpu", train=640, **keywords) -> Run:
    args = parse_args(f"/anywhere/{level}/train.py", list(argv))
    train_set = type("Set", (), {"name": "synthetic", "__len__": lambda self: train})()
    return Run(args, train_set, range(100), CPU, **keywords)


def train_all(run: Run) -> list[int]:
    """Go through all epochs as a level does; returns the number of batches of each."""
    counts = []
    for _ in run.epochs():
        counts.append(0)
        for _ in run.batches(range(100)):
            run.count(torch.tensor(1.0))
            counts[-1] += 1
    return counts


def finish(run: Run) -> dict:
    return run.result(BasicNet(), torch.tensor(0.5), torch.tensor([10.0, 90.0, 100.0], dtype=torch.float64))


@pytest.fixture
def let_pass(monkeypatch):
    """`let_pass(seconds)` on a clock that nothing else moves."""
    now = [0.0]
    monkeypatch.setattr(report, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def let_pass(seconds: float) -> None:
        now[0] += seconds

    return let_pass


def test_throughput_leaves_out_the_warm_up_and_the_evaluation(let_pass):
    meter = Meter(CPU, images_per_step=10)
    meter.start()
    for step in range(WARM_UP_STEPS + 20):
        let_pass(0.02 if step < WARM_UP_STEPS else 0.002)
        meter.step()
    meter.stop()
    let_pass(0.3)
    assert meter.seconds == pytest.approx(0.24)
    assert meter.images_per_sec == pytest.approx(5000)


def test_throughput_of_a_short_run_counts_all_of_it(let_pass):
    meter = Meter(CPU, images_per_step=10)
    meter.start()
    for _ in range(4):
        let_pass(0.01)
        meter.step()
    meter.stop()
    assert meter.images_per_sec == pytest.approx(1000)


def test_throughput_goes_on_in_the_next_epoch(let_pass):
    meter = Meter(CPU, images_per_step=10)
    for _ in range(3):
        meter.start()
        for _ in range(8):
            let_pass(0.005)
            meter.step()
        meter.stop()
        let_pass(0.2)
    assert meter.images_per_sec == pytest.approx(2000)


def test_epochs_and_steps_end_where_the_flags_say():
    run = a_run(["--epochs", "3"])
    counts = train_all(run)
    assert counts == [10, 10, 10]
    run = a_run(["--epochs", "3", "--max-steps", "14"])
    counts = train_all(run)
    assert counts == [10, 4] and finish(run)["steps"] == 14


def test_accumulation_counts_steps_not_micro_batches():
    run = a_run(["--gradient-accumulation-steps", "4", "--max-steps", "3"], level="03_accelerate")
    counts = train_all(run)
    assert counts == [12] and finish(run)["steps"] == 3


def test_the_loss_is_the_mean_of_the_last_epoch():
    run = a_run(["--epochs", "2"], train=128)
    for epoch in run.epochs():
        for batch in run.batches([1.0, 3.0]):
            run.count(torch.tensor(batch + 10 * epoch))
        assert run.mean_loss().item() == 2.0 + 10 * epoch and run.mean_loss().dtype == torch.float64


def test_a_training_set_smaller_than_a_batch_is_an_error():
    with pytest.raises(UserError, match="63 training samples are fewer than one batch of 64"):
        a_run(train=63)


@pytest.mark.parametrize(
    "argv, level, keywords, said",
    [
        ([], "00_single_gpu", {}, "batch 64 |"),
        ([], "02_ddp_raw", {"world_size": 2, "backend": "gloo"}, "2 × gloo on cpu"),
        ([], "02_ddp_raw", {"world_size": 2, "backend": "gloo"}, "batch 64 = 32 + 32 |"),
        ([], "01_data_parallel", {"world_size": 3, "backend": "EmulatedDataParallel"}, "64 = 22 + 22 + 20 |"),
        (
            ["--batch-size", "48", "--gradient-accumulation-steps", "2"],
            "03_accelerate",
            {"world_size": 2, "backend": "gloo"},
            "48 = 2 × 12 × 2 micro-batches |",
        ),
    ],
)
def test_the_plan_says_how_the_batch_is_shared(argv, level, keywords, said, capsys):
    a_run(argv, level, **keywords)
    plan = capsys.readouterr().out
    assert plan.count("\n") == 1 and said in plan and "synthetic 640 + 100" in plan


def _run_on_a_rank(folder: str) -> str:
    dist.init_process_group("gloo")
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            run = a_run(["--json", f"{folder}/r.json", "--save", f"{folder}/w.pt"], level="02_ddp_raw")
            list(run.batches(range(1)))
            assert finish(run)["world_size"] == 2
        return printed.getvalue()
    finally:
        dist.destroy_process_group()


def test_only_rank_0_prints_and_writes(tmp_path):
    first, second = ranks(2).run(_run_on_a_rank, str(tmp_path))
    assert first.count("\n") == 2 and "2 × gloo on cpu" in first and "batch 64 = 32 + 32 |" in first
    assert second == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.json", "w.pt"]
    assert json.loads((tmp_path / "r.json").read_text())["evaluated"] == 100
    assert torch.load(tmp_path / "w.pt", weights_only=True).keys() == BasicNet().state_dict().keys()


def test_the_result_has_the_keys_of_the_contract():
    run = a_run()
    list(run.batches(range(10)))
    result = finish(run)
    assert list(result) == [
        "level", "dataset", "device", "backend", "world_size", "global_batch_size", "epochs", "steps", "seed",
        "loss", "eval_loss", "accuracy", "evaluated", "images_per_sec", "seconds", "peak_memory_bytes", "memory_source",
    ]  # fmt: skip
    assert (result["accuracy"], result["eval_loss"], result["evaluated"]) == (0.9, 0.1, 100)


@pytest.mark.parametrize(
    "left, held",
    [
        ("checkpoint_0/.6f@7@host.tmp/model.safetensors", False),  # by a save that never ended
        ("checkpoint_0/.complete/manifest.json", True),
        ("checkpoint_0/model.safetensors", True),  # without a manifest: whoever put it there may want it
    ],
)
def test_whatever_is_held_under_a_checkpoints_name_but_a_draft_is_to_be_resumed(left, held, tmp_path):
    run = a_run(["--checkpoint-dir", str(tmp_path)], level="03_accelerate")
    assert not run.can_resume
    path = tmp_path / "checkpoints" / left
    path.parent.mkdir(parents=True)
    path.touch()
    assert run.can_resume == held


def test_a_level_whose_ranks_meet_after_loading_compares_their_data_too():
    said = ranks(2).run(train_on_other_data)
    assert said == ["the ranks have different data: rank 0 synthetic (320 samples), rank 1 synthetic (336 samples). "
                    "Name one with --dataset"] * 2  # fmt: skip


def train_on_other_data() -> str:
    module = ladder.load("04_trainer")
    samples = ["--train-samples", str(320 + 16 * int(os.environ["RANK"]))]
    try:
        with mock.patch("common.errors.time.sleep"):
            module.train(parse_args(module.__file__, ["--dataset", "synthetic", "--max-steps", "1", *samples]))
    except UserError as error:
        return str(error)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        PartialState._reset_state()
    return "trained"
