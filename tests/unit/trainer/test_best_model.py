"""The best model: how it is found, where it is saved, and that it is loaded at the end."""

import os
import weakref
from pathlib import Path

import pytest
import torch

from common.processes import ranks
from common.trainer import checkpoint
from tests.states import on_a_rank
from tests.unit.trainer.both import make, on_both
from tests.unit.trainer.toy import make_trainer, weights

NAN = float("nan")


def scored_trainer(folder, scores: dict[int, float], **arguments):
    """A Trainer whose evaluations give `scores`, by the step; it keeps the weights of each in `trainer.seen`."""
    every_epoch = {"eval_strategy": "epoch", "save_strategy": "epoch", "num_train_epochs": 3}
    settings = every_epoch | {"metric_for_best_model": "score", "load_best_model_at_end": True}
    trainer = make_trainer(folder, evaluate=8, **(settings | arguments))
    trainer.seen = {}

    def score(prediction) -> dict:
        step = trainer.state.global_step
        trainer.seen[step] = weights(trainer).clone()
        return {"score": scores[step]}

    trainer.compute_metrics = score
    return trainer


@pytest.mark.parametrize("greater_is_better", [True, False])
@pytest.mark.parametrize("save_strategy", ["epoch", "best"])
def test_a_score_that_is_nan_is_never_the_best(save_strategy, greater_is_better, tmp_path):
    scores = {5: NAN, 10: 1.0, 15: NAN}
    settings = {"save_strategy": save_strategy, "greater_is_better": greater_is_better}
    trainer = scored_trainer(tmp_path, scores, **settings)
    trainer.train()
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (1.0, 10)
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-10")
    assert torch.equal(weights(trainer), trainer.seen[10])
    saved = sorted(path.name for path in tmp_path.iterdir())
    every_epoch = ["checkpoint-10", "checkpoint-15", "checkpoint-5"]
    assert saved == (["checkpoint-10"] if save_strategy == "best" else every_epoch)


def test_another_runs_checkpoint_is_not_taken_for_the_best_and_that_there_is_none_is_said(tmp_path, caplog):
    steps = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "num_train_epochs": 1}
    # An earlier run has left a checkpoint of step 3; this run's best step is 3 too, and it does not save it.
    scored_trainer(tmp_path, dict.fromkeys(range(1, 6), 0.0), **steps, save_steps=3).train()
    scores = {1: 0.0, 2: 1.0, 3: 9.0, 4: 0.0, 5: 0.0}
    trainer = scored_trainer(tmp_path, scores, **steps, save_steps=2)
    trainer.train()
    assert trainer.state.best_global_step == 3
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    assert torch.equal(weights(trainer), trainer.seen[2])
    assert caplog.text.count("the best evaluation was at step 3, where no checkpoint was saved") == 1


def test_the_best_weights_are_on_the_device_one_at_a_time(tmp_path, monkeypatch):
    sent = []

    def send(tensor):
        assert not any(each() is not None for each in sent)
        sent.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(checkpoint, "broadcast", send)
    scored_trainer(tmp_path, {5: 0.0, 10: 1.0, 15: 0.0}).train()
    assert len(sent) > 1


@on_a_rank
def best_on_a_machine_of_its_own(folder):
    falling = {step: -step for step in range(20)}
    trainer = scored_trainer(folder / f"machine {os.environ['RANK']}", falling)
    trainer.train()
    return torch.equal(weights(trainer), trainer.seen[min(trainer.seen)])


def test_machines_without_a_shared_disk_get_the_best_weights_from_rank_0(tmp_path):
    assert ranks(2).run(best_on_a_machine_of_its_own, tmp_path) == [True, True]
    assert not [*tmp_path.glob("machine 1/checkpoint-*")]


@pytest.mark.parametrize("loads_best", [False, True])
def test_with_a_limit_of_one_the_best_and_the_newest_stay(loads_best, tmp_path, transformers):
    """The original leaves the best one alone, from which the run cannot go on."""

    def script(library, folder):
        by_epoch = {"eval_strategy": "epoch", "save_strategy": "epoch", "num_train_epochs": 3}
        best = {"metric_for_best_model": "score", "load_best_model_at_end": loads_best, "save_total_limit": 1}
        trainer = make(library, folder, **by_epoch, **best)
        trainer.compute_metrics = lambda prediction: {"score": {3: 9, 6: 1, 9: 2}[trainer.state.global_step]}
        trainer.train()
        return sorted(path.name for path in Path(folder).iterdir())

    assert on_both(script, tmp_path) == (["checkpoint-3", "checkpoint-9"], ["checkpoint-3"])
