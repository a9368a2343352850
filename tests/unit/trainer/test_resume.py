"""Interrupted anywhere and resumed, a training ends as if it had not been: same weights, same log history."""

import os
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

from common.trainer import EarlyStoppingCallback, TrainerCallback, get_last_checkpoint
from tests.bits import comparable_logs, cut_short, flip_a_bit
from tests.states import forget_states
from tests.toys import Points, Stream, seeded_net
from tests.unit.trainer.both import end, make, same_on_both
from tests.unit.trainer.toy import EVENTS, At, accuracy, make_trainer, stop, weights


class Killed(BaseException):
    """Not an Exception, so that nothing takes it for an error to handle."""


def kill(control) -> None:
    raise Killed


def busy_trainer(folder, callbacks=(), **arguments):
    """A Trainer whose training has what resuming may lose: dropout, metrics, accumulation and a tail."""
    busy = {"num_train_epochs": 2, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}
    busy |= {"logging_steps": 4, "lr_scheduler_type": "cosine", "warmup_steps": 2, "seed": 5}
    extra = {"compute_metrics": accuracy, "callbacks": list(callbacks)}
    model = seeded_net(dropout=0.3)
    return make_trainer(folder, model=model, train=23, evaluate=11, extra=extra, **(busy | arguments))


def run_busily(folder, callbacks=(), resume=None, **arguments):
    trainer = busy_trainer(folder, callbacks, **arguments)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def killed_and_resumed(folder, event: str, count: int, **arguments):
    """The Trainer that ends a run that was killed when `event` happened for the `count`-th time."""
    with pytest.raises(Killed):
        run_busily(folder, [At(event, count, kill)], **arguments)
    torch.rand(13)  # another process would have other random numbers
    has_saved = folder.is_dir() and get_last_checkpoint(str(folder)) is not None
    return run_busily(folder, resume=has_saved, **arguments)


def assert_same_end(trainer, straight) -> None:
    assert torch.equal(weights(trainer), weights(straight))
    assert comparable_logs(trainer.state.log_history) == comparable_logs(straight.state.log_history)
    assert trainer.state.global_step == straight.state.global_step
    assert trainer.state.best_metric == straight.state.best_metric


SETTINGS = {
    "steps": {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 2},
    "epochs": {"save_strategy": "epoch", "eval_strategy": "epoch", "logging_strategy": "epoch"},
    "steps, evaluated by epoch": {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "epoch"},
    "workers": {"save_strategy": "steps", "save_steps": 3, "dataloader_num_workers": 1},
    "max_steps": {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "eval_strategy": "epoch"},
}


def counted_by(happened: Counter) -> TrainerCallback:
    callback = TrainerCallback()
    for event in EVENTS:
        setattr(callback, event, lambda *args, event=event, **kwargs: happened.update([event]))
    return callback


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("examples", [2, pytest.param(13, marks=pytest.mark.slow)])
def test_killed_at_any_event_and_resumed_it_ends_the_same(name, examples, tmp_path):
    happened = Counter()
    straight = run_busily(tmp_path / "straight", [counted_by(happened)], **SETTINGS[name])
    del happened["on_init_end"]

    @example(event="on_step_end", count=4)  # It resumes within an epoch.
    @given(event=st.sampled_from(sorted(happened)), count=st.integers(0, 99))
    @settings(max_examples=examples)
    def check(event, count):
        shutil.rmtree(tmp_path / "killed", ignore_errors=True)
        resumed = killed_and_resumed(tmp_path / "killed", event, 1 + count % happened[event], **SETTINGS[name])
        assert_same_end(resumed, straight)

    check()


def test_loader_workers_change_no_bit(tmp_path):
    assert_same_end(*(run_busily(tmp_path, **SETTINGS["steps"], dataloader_num_workers=number) for number in (0, 1)))


def test_what_a_checkpoint_holds(tmp_path):
    run_busily(tmp_path, save_strategy="epoch")
    names = {path.name for path in (tmp_path / "checkpoint-4").iterdir()}
    assert {"model.safetensors", "optimizer.bin", "scheduler.bin", "random_states_0.pkl", "trainer_state.json"} <= names
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-4", "checkpoint-8"]


def test_an_incomplete_save_is_never_taken_for_a_checkpoint(tmp_path):
    trainer = busy_trainer(tmp_path, **SETTINGS["steps"], save_total_limit=1)
    saves = []

    def dies_the_second_time(models, weights, folder):
        saves.append(folder)
        if len(saves) == 2:
            raise Killed

    trainer.accelerator.register_save_state_pre_hook(dies_the_second_time)
    with pytest.raises(Killed):
        trainer.train()
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-3")  # not deleted before its successor
    resumed = run_busily(tmp_path, resume=True, **SETTINGS["steps"], save_total_limit=1)
    straight = run_busily(tmp_path / "straight", **SETTINGS["steps"])
    assert_same_end(resumed, straight)


@pytest.mark.parametrize("time_of", [int, lambda number: 0, lambda number: 2**31 - number])
def test_rotation_spares_the_best_and_the_newest_whatever_lies_around(time_of, tmp_path):
    """The times on the disk do not matter: all are equal, or a clock goes backwards."""
    stale = tmp_path / "checkpoint-900"
    stale.mkdir()
    (tmp_path / "checkpoint-notes").mkdir()
    found = []

    class Look(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            found.append(sorted(path.name for path in tmp_path.iterdir()))
            os.utime(tmp_path / f"checkpoint-{state.global_step}", (time_of(state.global_step),) * 2)

    best = {"metric_for_best_model": "score", "save_total_limit": 2, "per_device_train_batch_size": 12}
    settings = SETTINGS["epochs"] | best | {"num_train_epochs": 4, "gradient_accumulation_steps": 1}
    trainer = busy_trainer(tmp_path, [Look], **settings)
    trainer.compute_metrics = lambda prediction: {"score": {2: 1, 4: 5, 6: 2, 8: 3}[trainer.state.global_step]}
    trainer.train()
    assert found == [
        ["checkpoint-2", "checkpoint-900", "checkpoint-notes"],
        ["checkpoint-2", "checkpoint-4", "checkpoint-notes"],
        ["checkpoint-4", "checkpoint-6", "checkpoint-notes"],
        ["checkpoint-4", "checkpoint-8", "checkpoint-notes"],
    ]


@pytest.mark.slow
def test_early_stopping_counts_on_and_a_stopped_run_stays_stopped(tmp_path):
    scores = {4: 1.0, 8: 3.0, 12: 2.0, 16: 2.5, 20: 9.0}
    settings = SETTINGS["epochs"] | {"num_train_epochs": 5, "metric_for_best_model": "score"}

    def run(folder, resume, *callbacks):
        trainer = busy_trainer(folder, [EarlyStoppingCallback(2), *callbacks], **settings)
        trainer.compute_metrics = lambda prediction: {"score": scores[trainer.state.global_step]}
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    straight = run(tmp_path / "straight", False)
    assert straight.state.global_step == 16
    with pytest.raises(Killed):
        run(tmp_path / "killed", False, At("on_save", 3, kill))
    assert_same_end(run(tmp_path / "killed", True), straight)
    assert_same_end(run(tmp_path / "killed", True), straight)


def test_a_finished_run_goes_on_when_it_is_given_more_epochs(tmp_path):
    settings = SETTINGS["steps"] | {"lr_scheduler_type": "constant"}
    run_busily(tmp_path, **settings, num_train_epochs=1)
    longer = run_busily(tmp_path, resume=True, **settings, num_train_epochs=2)
    straight = run_busily(tmp_path / "straight", **settings, num_train_epochs=2)
    assert torch.equal(weights(longer), weights(straight))


class ThreeSteps(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_epoch_stop = state.global_step % 3 == 0


@pytest.mark.parametrize(("name", "event", "count"), [("steps", "on_save", 1), ("epochs", "on_epoch_begin", 2)])
def test_an_epoch_that_a_callback_cut_short_survives_a_restart(name, event, count, tmp_path):
    """It is neither gone on with nor taken for the next one."""
    arguments = SETTINGS[name] | {"num_train_epochs": 3}
    straight = run_busily(tmp_path / "straight", [ThreeSteps], **arguments)
    assert straight.state.global_step == 9
    with pytest.raises(Killed):
        run_busily(tmp_path / "killed", [ThreeSteps, At(event, count, kill)], **arguments)
    assert_same_end(run_busily(tmp_path / "killed", [ThreeSteps], True, **arguments), straight)


def run_on_stream(folder, extra=None, resume=None, accumulation=4, **arguments):
    """A Trainer after its training on a stream of 6 batches. Of windows of 4, the last is incomplete."""
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": accumulation, "max_steps": 6}
    settings |= {"logging_steps": 1, "save_strategy": "epoch"} | arguments
    trainer = make_trainer(folder, extra={"train_dataset": Stream(Points(23))} | (extra or {}), **settings)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_stream_that_was_stopped_at_the_end_of_an_epoch_goes_on_with_the_next_one(accumulation, tmp_path):
    """The gradients of an incomplete window belong to the next epoch's step."""
    settings = {"accumulation": accumulation, "max_steps": 8}
    straight = run_on_stream(tmp_path / "straight", **settings)
    run_on_stream(tmp_path / "stopped", {"callbacks": [At("on_epoch_end", 1, stop)]}, **settings)
    assert_same_end(run_on_stream(tmp_path / "stopped", resume=True, **settings), straight)


def test_losses_of_gradients_that_are_dropped_are_not_logged(tmp_path):
    """The last two of 6 micro-batches leave their gradients to the next step, unless a resumed run has other steps."""
    loss = {"compute_loss_func": lambda outputs, labels, num_items_in_batch: outputs["logits"].sum() * 0 + 1}
    run_on_stream(tmp_path, loss)
    resumed = run_on_stream(tmp_path, loss, str(tmp_path / "checkpoint-1"), accumulation=2)
    assert [entry["loss"] for entry in resumed.state.log_history if "loss" in entry] == [4, 2, 2, 2, 2, 2]


def test_an_epoch_that_a_callback_cut_within_a_step_survives_a_restart(tmp_path):
    arguments = {"save_strategy": "epoch", "logging_steps": 1}
    cut = At("on_substep_end", 2, lambda control: setattr(control, "should_epoch_stop", True))
    straight = run_busily(tmp_path, [cut], **arguments)
    assert_same_end(run_busily(tmp_path, resume=str(tmp_path / "checkpoint-1"), **arguments), straight)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 10)
        self.twin = nn.Linear(16, 10)
        self.twin.weight = self.linear.weight

    def forward(self, x, labels):
        return nn.functional.cross_entropy(self.linear(x) + self.twin(x), labels), self.linear(x)


def test_tied_weights_and_the_best_model_are_loaded(tmp_path):
    settings = {"eval_strategy": "epoch", "save_strategy": "epoch", "num_train_epochs": 2, "train": 8, "evaluate": 8}
    trainer = make_trainer(tmp_path, model=Tied(), load_best_model_at_end=True, **settings)
    kept = []

    def grow_worse(prediction):
        kept.append(weights(trainer).clone())
        return {"loss": len(kept)}

    trainer.compute_metrics = grow_worse
    trainer.train()
    assert torch.equal(weights(trainer), kept[0]) and not torch.equal(*kept)
    assert trainer.model.twin.weight is trainer.model.linear.weight


@pytest.mark.parametrize(
    "how, name", [(flip_a_bit, "model.safetensors"), (Path.unlink, "trainer_state.json"), (cut_short, "manifest.json")]
)
def test_a_damaged_newest_checkpoint_is_named_and_put_aside_and_the_one_before_taken(how, name, tmp_path, caplog):
    folder = tmp_path / "killed"
    with pytest.raises(Killed):
        run_busily(folder, [At("on_step_end", 7, kill)], **SETTINGS["steps"])
    how(folder / "checkpoint-6" / name)
    found = []

    class Look(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            found.append(sorted(path.name for path in folder.iterdir() if ".damaged-" not in path.name))

    resumed = run_busily(folder, [Look], True, **SETTINGS["steps"], save_total_limit=1)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "checkpoint-6" in warning and name in warning
    straight = run_busily(tmp_path / "straight", **SETTINGS["steps"])
    assert_same_end(resumed, straight)
    # The run has come to step 6 again; what was there is still to be had, and is not counted as a checkpoint.
    assert found == [["checkpoint-6"], ["checkpoint-8"]]
    assert len(list(folder.glob("checkpoint-6.damaged-*"))) == 1


@pytest.mark.parametrize("step", [3, 6])
def test_a_loader_that_is_no_data_loader_goes_on_where_it_was(step, tmp_path):
    def run(folder, resume=None):
        trainer = busy_trainer(folder, **SETTINGS["steps"])
        trainer.get_train_dataloader = lambda: list(DataLoader(Points(23), 3))
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    straight = run(tmp_path)
    assert_same_end(run(tmp_path / "more", str(tmp_path / f"checkpoint-{step}")), straight)


def test_a_prepared_loader_that_two_trainings_share_goes_on_where_it_was(tmp_path):
    trainer = busy_trainer(tmp_path, **SETTINGS["steps"])
    loader = trainer.get_train_dataloader()
    trainer.get_train_dataloader = lambda: loader
    trainer.train()
    trainer.train()
    resumed = run_busily(tmp_path / "more", resume=str(tmp_path / "checkpoint-3"), **SETTINGS["steps"])
    assert_same_end(resumed, trainer)


def end_of_resumed(trainer) -> dict:
    """The end of a resumed training, without the logs from before the checkpoint."""
    losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    return end(trainer) | {"logs": losses}


@pytest.mark.parametrize("step", [1, 3, 4])
def test_a_training_stopped_within_a_step_and_resumed_ends_the_same(step, tmp_path, transformers):
    """Both train the whole step again. 7 micro-batches make the steps 3 + 3 + 1."""
    same_on_both(stopped_within_a_step_and_resumed, tmp_path, step, Points(25))


@pytest.mark.parametrize("step", [1, 2])
def test_a_training_on_a_stream_stopped_within_a_step_and_resumed_ends_the_same(step, tmp_path, transformers):
    """7 micro-batches make the steps 3 + 3; the last one is no step."""
    same_on_both(stopped_within_a_step_and_resumed, tmp_path, step, Stream(Points(25)), 6)


def stopped_within_a_step_and_resumed(library, folder, step, dataset, max_steps=-1) -> dict:
    class StopWithinStep(library.TrainerCallback):
        def on_substep_end(self, args, state, control, **kwargs):
            if state.global_step == step:
                control.should_training_stop = True

    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "save_strategy": "epoch"}
    settings["max_steps"] = max_steps
    data = {"train_dataset": dataset}
    make(library, folder, extra=data | {"callbacks": [StopWithinStep]}, **settings).train()
    forget_states()
    resumed = make(library, folder, extra=data, **settings)
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-{step}")
    return end_of_resumed(resumed)


@pytest.mark.parametrize(
    ("first", "resumed_with"),
    [
        ({}, {"per_device_train_batch_size": 2}),
        ({}, {"gradient_accumulation_steps": 2}),
        ({"accelerator_config": {"use_seedable_sampler": False}}, {"per_device_train_batch_size": 8}),
        ({"seed": 3}, {"seed": 5}),
        ({"seed": 3, "data_seed": 4}, {"seed": 5}),
    ],
    ids=str,
)
def test_a_training_resumed_with_other_settings_ends_the_same(first, resumed_with, tmp_path, caplog, transformers):
    """It has dropout, and stops within an epoch: the batches that are passed over draw random numbers too."""
    common = {"per_device_train_batch_size": 4, "lr_scheduler_type": "constant", "save_steps": 3, **first}
    points = {"train_dataset": Points(25)}

    def script(library, folder):
        make(library, folder, extra=points, max_steps=3, save_strategy="steps", **common).train()
        forget_states()
        resumed = make(library, folder, extra=points, **common | resumed_with)
        resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
        return end_of_resumed(resumed)

    same_on_both(script, tmp_path)
    assert "nothing is prepared" not in caplog.text  # the position of the loader is left out on purpose


def test_a_checkpoint_of_adapters_has_none_of_the_weights_below(tmp_path, transformers):
    peft = pytest.importorskip("peft")
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}

    def make_adapted(library, folder, **more):
        torch.manual_seed(5)
        model = peft.get_peft_model(seeded_net(), peft.LoraConfig(r=2, target_modules=["linear"], lora_dropout=0.1))
        return make(library, folder, model=model, **settings | more)

    def script(library, folder):
        whole = make_adapted(library, folder, learning_rate=0.5, **best)
        whole.train()
        assert not Path(folder, "checkpoint-2", "model.safetensors").exists()
        end_of_whole = {"best step": whole.state.best_global_step, "weights": end(whole)["weights"]}
        forget_states()
        resumed = make_adapted(library, folder)
        resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
        return {"whole": end_of_whole, "resumed": end_of_resumed(resumed)}

    same_on_both(script, tmp_path)
