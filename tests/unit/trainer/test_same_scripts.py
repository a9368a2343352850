"""Scripts for transformers' Trainer with overrides, callbacks and loaders of their own end the same on ours.

Each script is written once, for whichever library it is given, and both outcomes are compared bit for bit.
"""

import json
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, SequentialSampler

from common.trainer import default_data_collator
from common.trainer.losses import CAUSAL_LOSS_TYPES
from tests.bits import comparable, digest
from tests.states import forget_states
from tests.toys import Points, Stream, seeded_net
from tests.unit.trainer.both import end, make, on_both, same_on_both, train
from tests.unit.trainer.toy import Junk, make_trainer

pytestmark = pytest.mark.usefixtures("transformers")


class Texts(Points):
    def __getitem__(self, index):
        labels = self.labels.roll(index)[:6].clone()
        labels[: 1 + index % 3] = index % 10
        labels[3 + index % 3 :] = -100
        return {"x": self.x[index], "labels": labels}


class LanguageModel(nn.Module):
    def __init__(self, loss_type, is_encoder_decoder) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 60)
        self.loss_type = loss_type
        self.config = SimpleNamespace(is_encoder_decoder=is_encoder_decoder)
        self.counts = []

    def forward(self, x, labels=None, shift_labels=None, **kwargs):
        logits = self.linear(x).view(-1, 6, 10)
        count = kwargs["num_items_in_batch"]
        self.counts.append((float(count), count.dtype))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return {"loss": loss / count, "logits": logits}


@pytest.mark.parametrize(
    ("loss_type", "is_encoder_decoder", "gives_shifted"),
    [
        ("ForMaskedLM", False, False),
        (CAUSAL_LOSS_TYPES[0], False, False),
        (CAUSAL_LOSS_TYPES[0], True, False),
        (CAUSAL_LOSS_TYPES[0], False, True),
    ],
)
def test_a_causal_model_is_given_the_number_of_its_targets(loss_type, is_encoder_decoder, gives_shifted, tmp_path):
    def collate(samples):
        batch = default_data_collator(samples)
        if gives_shifted:
            batch["shift_labels"] = batch["labels"][:, 2:]
        return batch

    def script(library, folder):
        model = seeded_net(LanguageModel, loss_type=loss_type, is_encoder_decoder=is_encoder_decoder)
        extra = {"train_dataset": Texts(22), "eval_dataset": Texts(16), "data_collator": collate}
        settings = {"gradient_accumulation_steps": 2, "num_train_epochs": 1, "label_names": ["labels"]}
        trainer = make(library, folder, model=model, extra=extra, **settings)
        trainer.train()
        trainer.evaluate()
        return model.counts, end(trainer)

    same_on_both(script, tmp_path)


def test_the_loss_types_of_causal_models_are_those_of_transformers(transformers):
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    assert {name for name, loss in LOSS_MAPPING.items() if loss is ForCausalLMLoss} == set(CAUSAL_LOSS_TYPES)


LABELLED = {
    "numbers": {"label": 0.5},
    "arrays": {"label": np.array([1, 0])},
    "tensors": {"label": torch.tensor(3, dtype=torch.int32)},
    "tensors of numbers": {"label": torch.tensor(0.5, dtype=torch.float64)},
}


@pytest.mark.parametrize("name", LABELLED)
def test_dicts_are_stacked_alike(name, transformers):
    left_out = {"text": "a", "none": None}
    columns = {"x": torch.ones(2), "array": np.ones(3), "number": 0.5, **left_out}
    samples = [columns | LABELLED[name] for _ in range(3)]
    ours = default_data_collator(samples)
    theirs = transformers.default_data_collator(samples)
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        assert tensor.dtype == theirs[key].dtype
        assert torch.equal(tensor, theirs[key])


class Sums(nn.Module):
    """Returns, besides the logits, a number for each class: no row of it belongs to a sample."""

    def __init__(self, **numbers) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 10)
        self.numbers = numbers

    def forward(self, x, labels=None):
        logits = self.linear(x)
        outputs = {"loss": F.cross_entropy(logits, labels), "logits": logits, "sums": logits.sum(0)}
        return outputs | self.numbers


def test_a_number_among_the_outputs_does_not_change_how_the_others_are_cut(tmp_path):
    def script(library, folder, **numbers):
        trainer = make(library, folder, model=seeded_net(Sums, **numbers), per_device_eval_batch_size=4)
        return digest(torch.from_numpy(trainer.predict(Points(6)).predictions[1]))

    ours, theirs = on_both(script, tmp_path)
    assert ours == theirs
    ours_with_number, theirs_with_number = on_both(partial(script, number=torch.tensor(1.0)), tmp_path)
    assert ours_with_number == ours
    assert theirs_with_number != theirs


def test_the_scheduler_of_the_script_is_given_to_callbacks_and_kept_in_a_second_training(tmp_path):
    def script(library, folder):
        positions = []

        class Watch(library.TrainerCallback):
            def on_step_end(self, args, state, control, lr_scheduler=None, **kwargs):
                positions.append((lr_scheduler.last_epoch, lr_scheduler.base_lrs, lr_scheduler is schedule))

        model = seeded_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        extra = {"optimizers": (optimizer, schedule), "callbacks": [Watch]}
        trainer = make(library, folder, model=model, extra=extra, max_steps=3)
        for _ in range(2):
            trainer.train()
        return positions, end(trainer)

    positions, _ = same_on_both(script, tmp_path)
    assert positions == [(step, [0.05], True) for step in (1, 2, 3, 4, 5, 6)]


class ScheduleFree(torch.optim.SGD):
    """Notes whenever it is told of a mode, in which an optimizer of this kind has other weights."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, lr=0.1)
        self.calls = []

    def train(self) -> None:
        self.calls.append("train")

    def eval(self) -> None:
        self.calls.append("eval")


def test_an_optimizer_with_modes_is_told_of_them(tmp_path):
    def script(library, folder):
        model = seeded_net()
        optimizer = ScheduleFree(model.parameters())
        extra = {"optimizers": (optimizer, None)}
        trainer = make(library, folder, model=model, extra=extra, eval_strategy="epoch")
        trainer.evaluate()
        trainer.train()
        trainer.predict(Points(5))
        return optimizer.calls

    ours = same_on_both(script, tmp_path)
    assert ours[:2] == ["eval", "train"] and ours[-1] == "eval"


class NoisyPoints(Points):
    """Draws a random number for each sample, and would draw another epoch's if it were told of epochs."""

    def set_epoch(self, epoch: int) -> None:
        self.x = self.x + epoch

    def __getitem__(self, index):
        return {"x": self.x[index] + torch.rand(()), "labels": self.labels[index]}


def batches_of_points(n: int) -> list[dict]:
    return list(DataLoader(Points(n), 4))


LOADERS = {
    "shuffled": lambda n: DataLoader(Points(n), 4, shuffle=True),
    "noisy": lambda n: DataLoader(NoisyPoints(n), 4, shuffle=True),
    "workers": lambda n: DataLoader(Points(n), 4, shuffle=True, num_workers=1),
    "without batches": lambda n: DataLoader(batches_of_points(n), batch_size=None, shuffle=True),
    "stream": lambda n: DataLoader(Stream(Points(n)), 4),
    "list": batches_of_points,
}


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_loader_of_an_override_is_trained_on_in_its_order(name, accumulation, tmp_path):
    def script(library, folder):
        class Own(library.Trainer):
            def get_train_dataloader(self):
                return LOADERS[name](22)

        limit = {"max_steps": 7} if name == "stream" else {}
        return train(library, folder, trainer_class=Own, gradient_accumulation_steps=accumulation, **limit)

    same_on_both(script, tmp_path)


def test_an_override_may_be_a_copy_of_the_originals_method(tmp_path):
    """Public subclasses copy `get_train_dataloader` and others, with the private methods that these call."""

    def script(library, folder):
        class Copied(library.Trainer):
            def get_train_dataloader(self):
                collator = self._get_collator_with_removed_columns(self.data_collator, description="training")
                settings = {"batch_size": self._train_batch_size, "sampler": self._get_train_sampler()}
                loader = DataLoader(self.train_dataset, collate_fn=collator, **settings)
                return self.accelerator.prepare(loader)

            def compute_loss(self, model, *args, **kwargs):
                self._move_model_to_device(teacher, self.args.device)
                return super().compute_loss(model, *args, **kwargs)

        teacher = seeded_net()
        trainer = make(library, folder, trainer_class=Copied, extra={"train_dataset": Junk(22)}, logging_steps=1)
        trainer.train()
        return trainer._get_output_dir(trial=None) == folder, trainer._get_learning_rate(), end(trainer)

    same_on_both(script, tmp_path)


class Numbered(Points):
    def __getitem__(self, index):
        return super().__getitem__(index) | {"number": index}


def test_overrides_may_keep_all_columns_and_choose_folder_and_context(tmp_path):
    def script(library, folder):
        class Own(library.Trainer):
            def _get_collator_with_removed_columns(self, data_collator, description):
                calls.append(description)
                return data_collator

            def compute_loss(self, model, inputs, *args, **kwargs):
                calls.append(inputs.pop("number").tolist())
                return super().compute_loss(model, inputs, *args, **kwargs)

            def compute_loss_context_manager(self):
                stack = super().compute_loss_context_manager()
                stack.enter_context(torch.autocast("cpu", torch.bfloat16))
                return stack

            def _get_output_dir(self, trial):
                return f"{folder}/{trial}"

            def log(self, logs, *args):
                calls.append(self.is_in_train)
                super().log(logs, *args)

        calls = []
        extra = {"train_dataset": Numbered(22)}
        trainer = make(library, folder, trainer_class=Own, extra=extra, max_steps=2, save_strategy="epoch")
        trainer.train()
        return calls, trainer.is_in_train, os.listdir(f"{folder}/None"), end(trainer)

    same_on_both(script, tmp_path)


def test_a_batch_may_ask_for_a_loss_without_labels(tmp_path):
    def collate(samples):
        return {"x": torch.stack([sample["x"] for sample in samples]), "return_loss": True}

    def script(library, folder):
        class Ranking(library.Trainer):
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                scores = model.linear(inputs["x"])
                loss = -F.logsigmoid(scores[:, 0] - scores[:, 1]).mean()
                return (loss, {"scores": scores}) if return_outputs else loss

        extra = {"data_collator": collate, "compute_metrics": lambda pair: {"rows": len(pair.predictions)}}
        settings = {"label_names": [], "remove_unused_columns": False, "eval_strategy": "epoch"}
        trainer = make(library, folder, trainer_class=Ranking, extra=extra, **settings)
        trainer.train()
        metrics = comparable(trainer.evaluate())
        assert {"eval_loss", "eval_rows"} <= metrics.keys()
        return metrics, end(trainer)

    same_on_both(script, tmp_path)


def test_a_checkpoint_of_adapters_has_none_of_the_weights_below(tmp_path):
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
        has_all_weights = Path(folder, "checkpoint-2", "model.safetensors").exists()
        forget_states()
        resumed = make_adapted(library, folder)
        output = resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
        return has_all_weights, whole.state.best_global_step, end(whole)["weights"], end_of_resumed(resumed, output)

    has_all_weights, *_ = same_on_both(script, tmp_path)
    assert not has_all_weights


@pytest.mark.parametrize("name", ["shuffled", "noisy", "list"])
def test_the_loader_of_an_override_is_evaluated_in_its_order(name, tmp_path):
    """24 samples in batches of 4: a smaller last batch has a row in DIFFERENCES.md."""

    def script(library, folder):
        class Own(library.Trainer):
            def get_eval_dataloader(self, eval_dataset=None):
                return LOADERS[name](24)

            get_test_dataloader = get_eval_dataloader

        settings = {"eval_strategy": "epoch", "per_device_eval_batch_size": 4}
        trainer = make(library, folder, trainer_class=Own, extra={"train_dataset": Points(24)}, **settings)
        trainer.train()
        metrics = comparable(trainer.evaluate())
        output = trainer.predict(Points(24))
        return metrics, output.predictions.tolist(), output.label_ids.tolist(), end(trainer)

    same_on_both(script, tmp_path)


def test_with_persistent_workers_each_evaluation_reads_its_own_set(tmp_path):
    """The original keeps the loader of the first one."""

    def script(library, folder):
        trainer = make(library, folder, dataloader_num_workers=1, dataloader_persistent_workers=True)
        return [trainer.evaluate(Points(n))["eval_loss"] for n in (16, 5)]

    ours, theirs = on_both(script, tmp_path)
    assert theirs == [ours[0], ours[0]] and ours[0] != ours[1]


@pytest.mark.parametrize(
    "event", ["on_train_begin", "on_epoch_begin", "on_step_begin", "on_substep_end", "on_epoch_end"]
)
@pytest.mark.parametrize("switch", ["should_training_stop", "should_epoch_stop"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_stop_acts_at_the_same_moment(event, switch, accumulation, tmp_path):
    def script(library, folder):
        def stop(self, args, state, control, **kwargs):
            setattr(control, switch, True)

        stopper = type("Stopper", (library.TrainerCallback,), {event: stop})
        settings = {"gradient_accumulation_steps": accumulation, "eval_strategy": "epoch"}
        return train(library, folder, extra={"callbacks": [stopper]}, **settings)

    same_on_both(script, tmp_path)


def test_a_callback_that_changes_the_accumulation_loses_no_sample(tmp_path):
    def script(library, folder):
        class Change(library.TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                args.gradient_accumulation_steps = 1

        extra = {"train_dataset": Points(24), "callbacks": [Change]}
        trainer = make(library, folder, extra=extra, gradient_accumulation_steps=3, per_device_train_batch_size=4)
        seen = []
        trainer.model.linear.register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
        trainer.train()
        return sum(seen)

    ours, theirs = on_both(script, tmp_path)
    assert theirs < ours == 2 * 24


def test_trackers_get_the_names_of_transformers(tmp_path):
    from transformers.integrations.integration_utils import rewrite_logs

    logs = {"loss": 1.0, "eval_loss": 2.0, "test_loss": 3.0, "eval_test_loss": 4.0}
    trainer = make_trainer(tmp_path, report_to="jsonl", logging_strategy="no")
    trainer.train()
    trainer.log(dict(logs))
    [file] = tmp_path.rglob("*.jsonl")
    tracked = json.loads(file.read_text().splitlines()[-1])
    assert rewrite_logs(logs).items() <= tracked.items()


def test_overrides_of_what_the_loop_is_made_of_are_called(tmp_path):
    def script(library, folder):
        calls = []

        class Own(library.Trainer):
            def _get_train_sampler(self, train_dataset=None):
                return SequentialSampler(train_dataset)

            def _get_eval_sampler(self, eval_dataset):
                return range(len(eval_dataset) - 1, -1, -1)

            def get_decay_parameter_names(self, model):
                return ["linear.bias"]

            def create_scheduler(self, *, num_training_steps):
                return super().create_scheduler(num_training_steps + 3)

            def _save_checkpoint(self, model, trial):
                calls.append((self.state.global_step, model is self.model, trial))
                super()._save_checkpoint(model, trial)

            def prediction_step(self, model, inputs, prediction_loss_only, **kwargs):
                calls.append(sorted(kwargs))
                return super().prediction_step(model, inputs, prediction_loss_only, **kwargs)

            def evaluation_loop(self, dataloader, description, *args, **kwargs):
                calls.append((description, kwargs["metric_key_prefix"], kwargs.get("prediction_loss_only")))
                return super().evaluation_loop(dataloader, description, *args, **kwargs)

        saving = {"save_strategy": "steps", "save_steps": 4}
        trainer = make(library, folder, trainer_class=Own, weight_decay=0.5, eval_strategy="epoch", **saving)
        trainer.train()
        output = trainer.predict(Points(5))
        return calls, output.label_ids.tolist(), end(trainer)

    same_on_both(script, tmp_path)


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "sgd", "rmsprop"])
def test_an_override_gives_the_optimizer_groups_of_its_own(optim, tmp_path):
    def script(library, folder):
        class TwoRates(library.Trainer):
            def create_optimizer(self):
                optimizer_class, arguments = library.Trainer.get_optimizer_cls_and_kwargs(self.args, self.model)
                first, *others = self.model.parameters()
                self.optimizer = optimizer_class([{"params": [first], "lr": 0.5}, {"params": others}], **arguments)
                return self.optimizer

        return train(library, folder, trainer_class=TwoRates, optim=optim, max_steps=3, learning_rate=0.01)

    same_on_both(script, tmp_path)


@pytest.mark.parametrize("loads_best", [False, True])
def test_with_a_limit_of_one_the_best_and_the_newest_stay(loads_best, tmp_path):
    """The original leaves the best one alone, from which the run cannot go on."""

    def script(library, folder):
        by_epoch = {"eval_strategy": "epoch", "save_strategy": "epoch", "num_train_epochs": 3}
        best = {"metric_for_best_model": "score", "load_best_model_at_end": loads_best, "save_total_limit": 1}
        trainer = make(library, folder, **by_epoch, **best)
        trainer.compute_metrics = lambda prediction: {"score": {3: 9, 6: 1, 9: 2}[trainer.state.global_step]}
        trainer.train()
        return sorted(path.name for path in Path(folder).iterdir())

    assert on_both(script, tmp_path) == (["checkpoint-3", "checkpoint-9"], ["checkpoint-3"])


def end_of_resumed(trainer, output) -> tuple:
    """The outcome of a resumed training, without the logs from before the checkpoint."""
    losses = [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    return output.global_step, losses, end(trainer)["weights"], torch.rand(()).item()


@pytest.mark.parametrize(("step", "is_stream"), [(1, False), (3, False), (4, False), (1, True), (2, True)])
def test_a_training_stopped_within_a_step_and_resumed_ends_the_same(step, is_stream, tmp_path):
    """Both train the whole step again. 7 micro-batches make the steps 3 + 3 + 1; of a stream, the last is no step."""
    points = {"train_dataset": Stream(Points(25)) if is_stream else Points(25)}
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "save_strategy": "epoch"}
    if is_stream:
        settings["max_steps"] = 6

    def script(library, folder):
        class StopWithinStep(library.TrainerCallback):
            def on_substep_end(self, args, state, control, **kwargs):
                if state.global_step == step:
                    control.should_training_stop = True

        make(library, folder, extra=points | {"callbacks": [StopWithinStep]}, **settings).train()
        forget_states()
        resumed = make(library, folder, extra=points, **settings)
        return end_of_resumed(resumed, resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-{step}"))

    same_on_both(script, tmp_path)


CHANGES = {
    "smaller batches": ({}, {"per_device_train_batch_size": 2}),
    "accumulation": ({}, {"gradient_accumulation_steps": 2}),
    "another order": ({"accelerator_config": {"use_seedable_sampler": False}}, {"per_device_train_batch_size": 8}),
    "seed": ({"seed": 3}, {"seed": 5}),
    "both seeds": ({"seed": 3, "data_seed": 4}, {"seed": 5, "data_seed": 4}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_training_resumed_with_other_settings_ends_the_same(name, tmp_path, caplog):
    """It has dropout, and stops within an epoch: the batches that are passed over draw random numbers too."""
    first, changed = CHANGES[name]
    common = {"per_device_train_batch_size": 4, "lr_scheduler_type": "constant", "save_steps": 3, **first}
    points = {"train_dataset": Points(25)}

    def script(library, folder):
        make(library, folder, extra=points, max_steps=3, save_strategy="steps", **common).train()
        forget_states()
        resumed = make(library, folder, extra=points, **common | changed)
        return end_of_resumed(resumed, resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-3"))

    same_on_both(script, tmp_path)
    assert "nothing is prepared" not in caplog.text  # the position of the loader is left out on purpose
