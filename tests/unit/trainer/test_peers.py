"""The same script on Hugging Face's Trainer: same weights, same log keys, same keys in trainer_state.json."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.suites import launch
from common import ladder
from common.args import parse_args
from common.processes import ranks
from common.trainer import Trainer, TrainingArguments
from tests.levels import EXACT, farthest, run_level
from tests.states import OURS, THEIRS, forget_states
from tests.toys import Points, seeded_net
from tests.unit.trainer.toy import accuracy, without_timings

pytestmark = pytest.mark.slow


@pytest.fixture
def transformers(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return pytest.importorskip("transformers")


SETTINGS = {
    "defaults": {},
    "accumulated": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1, "lr_scheduler_type": "cosine"},
    "sgd, warm": {"optim": "sgd", "warmup_steps": 3, "lr_scheduler_type": "inverse_sqrt", "max_grad_norm": 0},
    "tail dropped": {"dataloader_drop_last": True, "weight_decay": 0.1, "data_seed": 8},
    "steps": {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 4, "max_steps": 10},
    "share": {"logging_steps": 0.3, "warmup_steps": 0.5, "lr_scheduler_type": "constant_with_warmup"},
    "best": {"load_best_model_at_end": True, "metric_for_best_model": "accuracy", "save_total_limit": 2},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_arguments_mean_what_they_mean_there(name, tmp_path, transformers):
    # No step smaller than the others, which their logs weigh like those, and no tail of the evaluation to drop.
    train, evaluate = Points(53 if name == "tail dropped" else 50, torch.float64), Points(16, torch.float64)
    settings = {"num_train_epochs": 2, "per_device_train_batch_size": 5, "learning_rate": 0.05, "logging_steps": 3}
    settings |= {"eval_strategy": "epoch", "save_strategy": "epoch", "use_cpu": True, "report_to": "none"}
    settings |= {"disable_tqdm": True} | SETTINGS[name]
    ends = []
    for folder, trainer_class, arguments_class in (
        ("ours", Trainer, TrainingArguments),
        ("theirs", transformers.Trainer, transformers.TrainingArguments),
    ):
        trainer = trainer_class(
            seeded_net(dtype=torch.float64),
            arguments_class(str(tmp_path / folder), **settings),
            train_dataset=train,
            eval_dataset=evaluate,
            compute_metrics=accuracy,
        )
        trainer.train()
        state = json.loads(next(iter(sorted((tmp_path / folder).glob("*/trainer_state.json")))).read_text())
        ends.append(
            (
                dict(trainer.model.state_dict()),
                trainer.state,
                state,
                sorted(p.name for p in (tmp_path / folder).iterdir()),
            )
        )
    (ours, our_state, our_file, our_folders), (theirs, their_state, their_file, their_folders) = ends
    assert farthest(ours, theirs) <= 1e-9
    assert our_file.keys() == their_file.keys()
    assert our_folders == their_folders
    assert [entry.keys() for entry in our_state.log_history] == [entry.keys() for entry in their_state.log_history]
    for entry, other in zip(*map(without_timings, (our_state.log_history, their_state.log_history)), strict=True):
        assert entry == pytest.approx(other, rel=1e-5)
    for field in ("epoch", "global_step", "max_steps", "num_train_epochs", "best_global_step", "train_batch_size"):
        assert getattr(our_state, field) == getattr(their_state, field), field


def switched_script(folder: Path) -> Path:
    """Level 04's file with the import switched."""
    assert ladder.script("04_trainer").read_text().count("common.trainer import") == 1
    return launch.switched(launch.PEERS["04 on transformers"], folder)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_level_04_runs_on_it_with_the_import_switched(accumulation, tmp_path, transformers, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # There a last, partial window of micro-batches is a step in spite of `dataloader_drop_last`, which in turn drops
    # evaluation's tail: no partial window and no tail where those are not the subject.
    sizes = ["--train-samples", "288" if accumulation > 1 else "250", "--eval-samples", "96"]
    argv = [*EXACT, *sizes, "--gradient-accumulation-steps", str(accumulation)]
    ends = []
    modules = {"ours": ladder.load("04_trainer"), "theirs": ladder.load("04_trainer", switched_script(tmp_path))}
    for name, module in modules.items():
        checkpoints = tmp_path / name
        flags = [
            "--save",
            str(tmp_path / f"{name}.pt"),
            "--checkpoint-dir",
            str(checkpoints),
            "--checkpoint-every",
            "2",
        ]
        result = module.train(parse_args(module.__file__, [*argv, *flags]))
        state = json.loads((checkpoints / f"checkpoint-{result['steps']}" / "trainer_state.json").read_text())
        ends.append((result, torch.load(tmp_path / f"{name}.pt", weights_only=True), state))
    (result, weights, state), (their_result, their_weights, their_state) = ends
    assert farthest(weights, their_weights) <= 1e-9
    for key in ("steps", "evaluated", "accuracy", "world_size"):
        assert result[key] == their_result[key]
    for key in ("loss", "eval_loss"):
        assert result[key] == pytest.approx(their_result[key], rel=1e-5)  # theirs are summed in float32
    assert state.keys() == their_state.keys()
    assert [entry.keys() for entry in state["log_history"]] == [entry.keys() for entry in their_state["log_history"]]


def _train_and_forget(library, argv, path=None):
    """On a rank: level 04's result and weights, or those of another version of its file."""
    try:
        return run_level("04_trainer", argv, path)
    finally:
        forget_states(library)


def test_level_04_on_two_processes_ends_with_its_bits(tmp_path, transformers):
    argv = [*EXACT, "--eval-samples", "96"]
    outcomes = ranks(2).run(_train_and_forget, OURS, argv)
    offline = {"HF_HUB_OFFLINE": "1"}
    theirs = ranks(2).run(_train_and_forget, THEIRS, argv, switched_script(tmp_path), environment=offline)
    for (result, _), (their_result, _) in zip(outcomes, theirs, strict=True):
        for key in ("steps", "evaluated", "accuracy", "world_size"):
            assert result[key] == their_result[key]
    (_, weights), (_, their_weights) = outcomes[0], theirs[0]
    assert weights.keys() == their_weights.keys()
    assert all(torch.equal(weights[name], their_weights[name]) for name in weights)
