"""Plan, throughput and result: counted right, said once."""

import contextlib
import functools
import io
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from common import ladder
from common.args import CheckpointInterval, parse_args
from common.errors import UserError
from common.model import BasicNet
from common.process_group import process_group
from common.processes import ranks
from common.run import Run
from common.run.checkpointing import Checkpointing
from common.run.metrics import Meter
from tests.levels import SHORT, farthest, run_level
from tests.states import forget_states

CPU = torch.device("cpu")
WARM_UP_STEPS = 10
TWO_STEPS = ["--dataset", "synthetic", "--train-samples", "96", "--eval-samples", "32", "--batch-size", "32"]
TWO_STEPS += ["--max-steps", "2"]


def a_run(argv=(), level="00_single_gpu", train=640, **keywords) -> Run:
    args = parse_args(str(ladder.script(level)), list(argv))
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
    return run.result(torch.tensor(0.5), torch.tensor([10.0, 90.0, 100.0], dtype=torch.float64))


@pytest.fixture
def let_pass(monkeypatch):
    """`let_pass(seconds)` on a clock that nothing else moves."""
    now = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0], monotonic=lambda: now[0])
    for module in ("common.run.run", "common.run.metrics", "common.run.checkpointing"):
        monkeypatch.setattr(f"{module}.time", clock)

    def let_pass(seconds: float) -> None:
        now[0] += seconds

    return let_pass


@pytest.mark.parametrize(
    "epochs, images_per_sec",
    [
        pytest.param([WARM_UP_STEPS * [0.02] + 20 * [0.002]], 5000, id="without the warm-up"),
        pytest.param([4 * [0.01]], 1000, id="of all of a short run"),
        pytest.param(3 * [8 * [0.005]], 2000, id="over several epochs"),
    ],
)
def test_throughput_is_of_the_steps_after_the_warm_up_and_of_no_evaluation(epochs, images_per_sec, let_pass):
    meter = Meter(CPU, images_per_step=10, warm_up_steps=WARM_UP_STEPS)
    for steps in epochs:
        meter.start()
        for seconds in steps:
            let_pass(seconds)
            meter.step()
        meter.stop()
        let_pass(0.3)
    assert meter.seconds == pytest.approx(sum(sum(steps) for steps in epochs))
    assert meter.images_per_sec == pytest.approx(images_per_sec)


@pytest.mark.parametrize(
    "flags, level, batches, steps",
    [
        (["--epochs", "3"], "00_single_gpu", [10, 10, 10], 30),
        (["--epochs", "3", "--max-steps", "14"], "00_single_gpu", [10, 4], 14),
        (["--gradient-accumulation-steps", "4", "--max-steps", "3"], ladder.FULL, [12], 3),
    ],
)
def test_epochs_and_steps_end_where_the_flags_say(flags, level, batches, steps):
    run = a_run(flags, level)
    assert train_all(run) == batches
    assert finish(run)["steps"] == steps


def test_the_loss_is_the_mean_of_the_last_epoch():
    run = a_run(["--epochs", "2"], train=128)
    for epoch in run.epochs():
        for batch in run.batches([1.0, 3.0]):
            run.count(torch.tensor(batch + 10 * epoch))
        assert run.mean_loss().item() == 2.0 + 10 * epoch and run.mean_loss().dtype == torch.float64


@pytest.mark.parametrize("is_terminal, lines", [(False, 2), (True, 0)])
def test_a_log_file_gets_a_line_a_minute(is_terminal, lines, monkeypatch, capsys, let_pass):
    run = a_run(["--epochs", "2"])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    for epoch in run.epochs():
        for _ in run.batches(range(100)):
            let_pass(7)
            run.count(torch.tensor(1.0 + epoch))
    said = [line for line in capsys.readouterr().err.splitlines() if " of 20" in line]
    expected = [
        "00_single_gpu: step 9 of 20, loss 1.0000 in epoch 1 of 2",
        "00_single_gpu: step 18 of 20, loss 2.0000 in epoch 2 of 2",
    ]
    assert said[:2] == expected[:lines]


def test_an_evaluation_has_a_bar_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert list(a_run().eval_batches([1, 2, 3])) == [1, 2, 3]
    assert "evaluation:" in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    assert list(a_run().eval_batches([1, 2, 3])) == [1, 2, 3]
    assert capsys.readouterr().err == ""


def test_a_training_set_smaller_than_a_batch_is_an_error():
    with pytest.raises(UserError, match="63 training samples are fewer than one batch of 64"):
        a_run(train=63)


@pytest.mark.parametrize(
    "argv, level, keywords, said",
    [
        ([], "00_single_gpu", {}, "batch 64 | 10 steps"),
        (["--max-steps", "1"], "00_single_gpu", {}, "batch 64 | 1 step"),
        (["--dtype", "float64"], "00_single_gpu", {}, ": 1 process on cpu, 2 threads, float64"),
        (
            ["--mixed-precision", "bf16"],
            ladder.FULL,
            {},
            "03_accelerate/train_full: 1 process on cpu, 2 threads, bf16 ",
        ),
        ([], "03_accelerate", {}, "03_accelerate: 1 process on cpu"),
        (
            [],
            "01_data_parallel",
            {"world_size": 2, "backend": "EmulatedDataParallel"},
            "on cpu, 3 threads each, float32",
        ),
        ([], "02_ddp_raw", {"world_size": 2, "backend": "gloo"}, "2 × gloo on cpu"),
        ([], "02_ddp_raw", {"world_size": 2, "backend": "gloo"}, "batch 64 = 32 + 32 |"),
        ([], "01_data_parallel", {"world_size": 3, "backend": "EmulatedDataParallel"}, "64 = 22 + 22 + 20 |"),
        (
            ["--batch-size", "48", "--gradient-accumulation-steps", "2"],
            ladder.FULL,
            {"world_size": 2, "backend": "gloo"},
            "48 = 2 × 12 × 2 micro-batches |",
        ),
    ],
)
def test_the_plan_says_on_what_the_run_computes_and_how_the_batch_is_shared(
    argv, level, keywords, said, capsys, monkeypatch
):
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    monkeypatch.setattr("common.cores.available_cores", lambda: 6)
    plan = a_run(argv, level, **keywords).plan
    assert "\n" not in plan and said in plan and "synthetic 640 + 100" in plan
    assert capsys.readouterr().out == ""  # whoever makes a Run decides who prints


def _what_a_rank_says(level: str, folder: str) -> str:
    flags = ["--dataset", "synthetic", "--max-steps", "1", "--train-samples", "64", "--eval-samples", "100"]
    module = ladder.load(level)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        module.train(parse_args(module.__file__, [*flags, "--json", f"{folder}/r.json", "--save", f"{folder}/w.pt"]))
    return printed.getvalue()


@pytest.mark.parametrize("level", ["02_ddp_raw", "03_accelerate"])
def test_only_rank_0_prints_and_writes(level, tmp_path):
    first, second = ranks(2).run(_what_a_rank_says, level, str(tmp_path))
    assert first.count("\n") == 2 and "2 × gloo on cpu" in first and "batch 64 = 32 + 32 |" in first
    assert second == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.json", "w.pt"]
    assert json.loads((tmp_path / "r.json").read_text())["evaluated"] == 100
    assert torch.load(tmp_path / "w.pt", weights_only=True).keys() == BasicNet().state_dict().keys()


def test_what_cannot_be_written_is_one_line_that_names_it(tmp_path):
    run = a_run(["--json", str(tmp_path / "r.json")])
    list(run.batches(range(10)))
    (tmp_path / "r.json").mkdir()
    (tmp_path / "r.json" / "in the way").touch()
    result = finish(run)
    with pytest.raises(UserError, match=f"{tmp_path}/r.json cannot be written: "):
        run.report(result, BasicNet())


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
        ("checkpoint_0.damaged-1a2b3c4d/model.safetensors", False),  # set aside by a run that resumed before it
    ],
)
def test_whatever_is_held_under_a_checkpoints_name_but_a_draft_is_to_be_resumed(left, held, tmp_path):
    checkpoints = Checkpointing(tmp_path, CheckpointInterval(steps=5), CPU)
    assert not checkpoints.can_resume("checkpoint_", "checkpoints")
    path = tmp_path / "checkpoints" / left
    path.parent.mkdir(parents=True)
    path.touch()
    assert checkpoints.can_resume("checkpoint_", "checkpoints") == held
    assert not checkpoints.can_resume("checkpoint-")


def _as_rank_0_finds(folder: str) -> bool:
    """Each rank has a disk of its own, and only rank 1's has a checkpoint; then only rank 0's."""
    with process_group():
        checkpoints = Checkpointing(Path(folder, os.environ["RANK"]), CheckpointInterval(), CPU)
        return checkpoints.can_resume("checkpoint-")


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_decides_for_all_whether_to_resume(rank, tmp_path):
    held = tmp_path / str(rank) / "checkpoint-5"
    held.mkdir(parents=True)
    (held / "model.safetensors").touch()
    assert ranks(2).run(_as_rank_0_finds, str(tmp_path)) == [rank == 0] * 2


def test_checkpoints_are_due_by_steps_or_by_time(tmp_path, let_pass):
    by_steps = Checkpointing(tmp_path, CheckpointInterval(steps=3), CPU)
    by_time = Checkpointing(tmp_path, CheckpointInterval(seconds=60), CPU)
    due = {"steps": [], "time": []}
    for step in range(1, 13):
        let_pass(25)
        for name, checkpoints in (("steps", by_steps), ("time", by_time)):
            checkpoints.ask_all_ranks(step)
            if checkpoints.is_due(step, 100):
                due[name].append(step)
    assert due == {"steps": [3, 6, 9, 12], "time": [3, 6, 9, 12]}
    nowhere = Checkpointing(None, CheckpointInterval(steps=1), CPU)
    nowhere.ask_all_ranks(1)
    assert not nowhere.is_due(1, 1)


@pytest.mark.parametrize("level", ladder.with_checkpoints())
def test_the_last_step_is_saved_and_said_and_resumed_there_is_nothing_to_train(level, tmp_path, capsys):
    module = ladder.load(level)
    args = parse_args(module.__file__, [*TWO_STEPS, "--checkpoint-dir", str(tmp_path)])
    first = module.train(args)
    said = capsys.readouterr().out
    assert said.count("saved at step") == 1 and f"saved at step 2 in {tmp_path}\n" in said
    again = module.train(args)
    said = capsys.readouterr().out
    assert "saved at step" not in said
    assert "| nothing was left to train | 2 steps in " in said.splitlines()[-1]
    same = ("steps", "loss", "eval_loss", "accuracy")
    assert [again[name] for name in same] == [first[name] for name in same]
    assert 0 < again["seconds"] <= first["seconds"] and again["images_per_sec"] == 0


def _due_by_the_clock_of_rank_1(folder: str) -> list[int]:
    with process_group():
        seconds = 1e-9 if os.environ["RANK"] == "1" else 1e9
        checkpoints = Checkpointing(Path(folder), CheckpointInterval(seconds=seconds), CPU)
        due = []
        for step in range(1, 31):
            checkpoints.ask_all_ranks(step)
            if checkpoints.is_due(step, 100):
                due.append(step)
        return due


def test_where_one_rank_says_that_the_time_is_up_all_save_at_the_same_step(tmp_path):
    assert ranks(2).run(_due_by_the_clock_of_rank_1, str(tmp_path)) == [[10, 20, 30]] * 2


def test_a_level_whose_ranks_meet_after_loading_compares_their_data_too():
    said = ranks(2).run(train_on_other_data)
    assert said == ["the ranks have different data: rank 0 synthetic (320 samples), rank 1 synthetic (336 samples). "
                    "Name one with --dataset"] * 2  # fmt: skip


def train_on_other_data() -> str:
    module = ladder.load("04_trainer")
    samples = ["--train-samples", str(320 + 16 * int(os.environ["RANK"]))]
    try:
        with mock.patch("common.errors.time"):
            module.train(parse_args(module.__file__, ["--dataset", "synthetic", "--max-steps", "1", *samples]))
    except UserError as error:
        return str(error)
    finally:
        forget_states()
    return "trained"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """`saved(level)`: the folder of a run of this level that has ended, the same for all who ask."""

    @functools.cache
    def run(level: str) -> Path:
        folder = tmp_path_factory.mktemp("saved")
        run_level(level, [*TWO_STEPS, "--checkpoint-dir", str(folder)])
        return folder

    return run


@pytest.mark.parametrize("level", [ladder.FULL, pytest.param("04_trainer", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "flags, difference",
    [
        (["--lr", "0.5"], "learning rate 0.001, not 0.5"),
        (["--seed", "43"], "seed 42, not 43"),
        (["--train-samples", "100"], "training samples 96, not 100"),
        (["--batch-size", "16"], "batch size 32, not 16"),
        (["--dataset", "mnist"], "dataset synthetic, not mnist"),
        (["--dtype", "float64"], "dtype float32, not float64"),
        (["--no-dropout"], "dropout True, not False"),
    ],
)
def test_a_run_that_was_asked_for_something_else_is_not_resumed(level, flags, difference, saved, capsys, request):
    if "mnist" in flags:
        flags = [*flags, "--data-dir", request.getfixturevalue("mnist")]
    folder = saved(level)
    module = ladder.load(level)
    with pytest.raises(UserError, match=f"the checkpoint in {folder} is of a run with {difference}"):
        module.train(parse_args(module.__file__, [*TWO_STEPS, "--checkpoint-dir", str(folder), *flags]))
    assert "Resumed" not in capsys.readouterr().out


def test_a_batch_that_a_notebooks_processes_cannot_share_is_refused(monkeypatch):
    """Its flags are made before the processes are."""
    monkeypatch.setattr("common.run.run.get_world_size", lambda: 3)
    with pytest.raises(UserError, match=r"--batch-size 64 does not divide by 3 \(3 processes\): use 63 or 66"):
        a_run(level="04_trainer")


@pytest.mark.parametrize("level", ladder.with_checkpoints())
def test_the_flag_decides_on_the_precision_also_against_the_launcher(level, monkeypatch):
    argv = [*SHORT, "--max-steps", "1", "--mixed-precision", "no"]
    _, weights = run_level(level, argv)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    _, against_the_launcher = run_level(level, argv)
    assert farthest(weights, against_the_launcher) == 0
