"""The names that scripts and overrides read from transformers' Trainer: there with the same values, or on the page."""

import importlib
import os
import re
from dataclasses import fields
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from common import ladder, trainer
from common.accelerator import PartialState
from common.processes import ranks
from common.trainer.setup import NEVER_CALLED
from tests.bits import differences, with_digests
from tests.states import forget_states, on_a_rank
from tests.toys import Net, Points
from tests.unit.trainer.both import LIBRARIES, end, make, same_on_both
from tests.unit.trainer.toy import make_trainer

pytestmark = pytest.mark.usefixtures("transformers")


def test_a_script_asks_what_is_on_and_saves_the_weights_that_it_has_copied(tmp_path):
    def script(library, folder):
        class Own(library.Trainer):
            def _save(self, output_dir=None, state_dict=None):
                super()._save(f"{output_dir}/inner", state_dict)

        trainer = make(library, folder, trainer_class=Own)
        args = trainer.args
        asked = [trainer.deepspeed, trainer.is_deepspeed_enabled, trainer.is_fsdp_enabled, args.deepspeed]
        asked += [args.debug, args.local_rank, args.label_smoothing_factor, args.eval_do_concat_batches]
        asked += [args.distributed_state.num_processes, args.device, args.process_index, args.world_size]
        asked += [trainer.label_smoother, trainer.hp_search_backend, trainer.can_return_loss, trainer.is_in_train]
        asked += [trainer.num_examples(trainer.get_train_dataloader()), trainer.get_num_trainable_parameters()]
        asked += [trainer.args.average_tokens_across_devices, trainer._wrap_model(trainer.model) is trainer.model]
        asked += [args.save_strategy.value, args.lr_scheduler_type.value, args.optim.value]
        asked += [library.TrainingArguments(folder, report_to="all").report_to]
        asked += [type(trainer.autocast_smart_context_manager(cache_enabled=False))]
        trainer.save_model(f"{folder}/as-it-is")
        halves = {name: tensor / 2 for name, tensor in trainer.model.state_dict().items()}
        trainer._save(f"{folder}/halves", state_dict=halves)
        files = [f"{folder}/{name}/inner/model.safetensors" for name in ("as-it-is", "halves")]
        return asked, [with_digests(load_file(file)) for file in files]

    _, saved = same_on_both(script, tmp_path)
    assert saved[0] != saved[1]


def test_a_script_puts_functions_in_the_places_of_methods(tmp_path):
    def script(library, folder):
        class Patient(library.EarlyStoppingCallback):
            def check_metric_value(self, args, state, control, metric_value):
                calls.append("check_metric_value")
                self.early_stopping_patience_counter += state.global_step // 4

        class Own(library.Trainer):
            def evaluate(self, eval_dataset=None, **kwargs):
                calls.append(sorted(kwargs))
                return super().evaluate(eval_dataset, **kwargs)

        def save_model(output_dir, **kwargs):
            calls.append(sorted(kwargs))
            Path(output_dir).mkdir(exist_ok=True)

        def compute_loss(model, inputs, **kwargs):
            with trainer.compute_loss_context_manager():
                calls.append(trainer.is_in_train)
                return Own.compute_loss(trainer, model, inputs, **kwargs)

        calls = []
        sets = {"eval_dataset": {"one": Points(4), "two": Points(8)}, "callbacks": [Patient(1)]}
        steps = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
        trainer = make(library, folder, trainer_class=Own, extra=sets, metric_for_best_model="one_loss", **steps)
        trainer.callback_handler.remove_callback(library.PrinterCallback)
        trainer.compute_loss = compute_loss
        trainer.save_model = save_model
        metrics = trainer.train().metrics
        return calls, "total_flos" in metrics, end(trainer)

    calls, keeps_total, _ = same_on_both(script, tmp_path)
    assert ["_internal_call"] in calls and "check_metric_value" in calls and keeps_total


@pytest.mark.parametrize(
    "names",
    [
        ["training_step", "_prepare_inputs", "_prepare_input", "_get_num_items_in_batch"],
        ["compute_loss", "compute_loss_context_manager", "log", "_load_best_model"],
        ["prediction_step", "_prepare_context_parallel_inputs"],
        ["get_train_dataloader", "get_eval_dataloader"],
        ["_get_dataloader", "_get_train_sampler", "_get_eval_sampler"],
        ["create_optimizer", "get_optimizer_cls_and_kwargs", "get_decay_parameter_names"],
        ["evaluation_loop"],
    ],
)
def test_a_subclass_copies_methods_of_the_original(tmp_path, names, transformers):
    def script(library, folder):
        copies = {name: vars(transformers.Trainer)[name] for name in names}
        Own = type("Own", (library.Trainer,), copies)
        saving = {"save_strategy": "epoch", "load_best_model_at_end": True}
        trainer = make(library, folder, trainer_class=Own, eval_strategy="epoch", torch_empty_cache_steps=2, **saving)
        trainer.train()
        return end(trainer)

    same_on_both(script, tmp_path)


def train_and_evaluate(library, folder, settings) -> tuple:
    trainer = make(library, folder, eval_strategy="epoch", save_strategy="epoch", **settings)
    trainer.train()
    trained = end(trainer)
    trainer.evaluate()
    saved = load_file(f"{folder}/checkpoint-{trainer.state.global_step}/model.safetensors")
    return trained, end(trainer), with_digests(saved), any(Path(folder).rglob("optimizer.*"))


@on_a_rank
def train_on_a_rank(name, folder, settings) -> tuple:
    return train_and_evaluate(importlib.import_module(name), str(folder / name), settings)


SETTINGS = [{"torch_empty_cache_steps": 2}, {"bf16": True, "bf16_full_eval": True}, {"save_only_model": True}]


@pytest.mark.parametrize("settings", SETTINGS)
def test_settings_of_memory_end_with_the_bits_of_the_original(settings, tmp_path):
    trained, evaluated, _, has_optimizer = same_on_both(train_and_evaluate, tmp_path, settings)
    assert (trained["weights"] != evaluated["weights"]) == ("bf16_full_eval" in settings)
    assert has_optimizer == ("save_only_model" not in settings)


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS)
def test_settings_of_memory_end_with_the_bits_of_the_original_on_two_processes(settings, tmp_path):
    offline = {"HF_HUB_OFFLINE": "1"}
    outcomes = [ranks(2).run(train_on_a_rank, name, tmp_path, settings, environment=offline) for name in LIBRARIES]
    assert list(differences(*outcomes)) == []


def test_a_script_replaces_methods_of_the_class_and_a_class_of_torch(tmp_path):
    Own = type("Own", (torch.optim.AdamW,), {})

    def script(library, folder):
        def save(trainer, output_dir=None, state_dict=None):
            calls.append(type(trainer.optimizer.optimizer).__name__)
            original(trainer, output_dir, state_dict)

        calls = []
        original = library.Trainer._save
        with mock.patch.object(library.Trainer, "_save", save), mock.patch("torch.optim.AdamW", Own):
            make(library, folder, save_strategy="epoch", optim="adamw_torch").train()
        return calls

    assert same_on_both(script, tmp_path) == ["Own", "Own"]


def test_what_is_overridden_in_vain_is_named(tmp_path, caplog):
    class Own(trainer.Trainer):
        _maybe_log_save_evaluate = None

    make_trainer(tmp_path, trainer_class=Own, max_steps=1).train()
    assert "does not call _maybe_log_save_evaluate of Own" in caplog.text
    assert [name for name in NEVER_CALLED if hasattr(trainer.Trainer, name)] == []


def test_arguments_start_nothing(tmp_path):
    forget_states()
    arguments = trainer.TrainingArguments(tmp_path, use_cpu=True)
    assert not PartialState._shared_state
    assert trainer.Trainer(Net(), arguments) and PartialState._shared_state


def test_an_override_of_save_writes_into_checkpoints_too(tmp_path):
    def script(library, folder):
        class Own(library.Trainer):
            def _save(self, output_dir=None, state_dict=None):
                super()._save(output_dir, state_dict)
                Path(output_dir, "head").mkdir()
                torch.save(self.model.linear.bias, f"{output_dir}/head/bias.pt")

        saving = {"save_strategy": "steps", "save_steps": 2}
        make(library, folder, trainer_class=Own, max_steps=4, **saving).train()
        forget_states()
        resumed = make(library, folder, trainer_class=Own, max_steps=6, **saving)
        resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-4")
        return sorted(path.parts[-3] for path in Path(folder).rglob("bias.pt")), end(resumed)["weights"]

    folders, _ = same_on_both(script, tmp_path)
    assert folders == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


def test_a_file_of_results_is_replaced_or_left_alone(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path)
    trainer.save_state()
    trainer.save_metrics("eval", {"loss": 1})
    before = {path: path.read_text() for path in tmp_path.iterdir()}
    monkeypatch.setattr(os, "replace", mock.Mock(side_effect=OSError("the disk is full")))
    trainer.state.global_step = 1
    for write in (trainer.save_state, partial(trainer.save_metrics, "eval", {"loss": 2})):
        with pytest.raises(OSError, match="the disk is full"):
            write()
    assert {path: path.read_text() for path in tmp_path.iterdir()} == before


def test_overrides_of_evaluate_and_log_tell_the_callbacks_themselves(tmp_path):
    def script(library, folder):
        seen = []

        class Watch(library.TrainerCallback):
            def on_evaluate(self, args, state, control, metrics, **kwargs):
                seen.append((state.global_step, metrics["eval_extra"], sorted(kwargs)))
                seen.append(kwargs["eval_dataloader"] is trainer.callback_handler.eval_dataloader)
                control.should_training_stop = state.global_step >= 6

            def on_log(self, args, state, control, logs, **kwargs):
                seen.append(sorted(logs))

        class Own(library.Trainer):
            def log(self, logs, *args):
                self.state.log_history.append(logs)
                self.control = self.callback_handler.on_log(self.args, self.state, self.control, logs)

            def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
                output = self.evaluation_loop(
                    self.get_eval_dataloader(eval_dataset),
                    description="Evaluation",
                    prediction_loss_only=None,
                    ignore_keys=ignore_keys,
                    metric_key_prefix=metric_key_prefix,
                )
                metrics = output.metrics | {"eval_extra": 1.0}
                if self.args.should_save:
                    self.log(metrics)
                self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
                return metrics

        trainer = make(
            library, folder, trainer_class=Own, extra={"callbacks": [Watch]}, eval_strategy="epoch", num_train_epochs=3
        )
        trainer.train()
        logged = end(trainer)
        trainer.evaluate()
        return seen, logged

    ours = same_on_both(script, tmp_path)
    assert ours[1]["steps"][0] == 6


def test_a_callback_with_a_state_is_in_checkpoints(tmp_path):
    def script(library, folder):
        from transformers.trainer_callback import ExportableState

        class Counter(library.TrainerCallback, ExportableState):
            steps = 0

            def on_step_end(self, args, state, control, **kwargs):
                self.steps += 1

            def state(self):
                return {"args": {}, "attributes": {"steps": self.steps}}

        trainer = make(library, folder, extra={"callbacks": [Counter]}, save_strategy="steps", save_steps=2)
        trainer.train()
        return trainer.state.stateful_callbacks["Counter"]

    assert same_on_both(script, tmp_path) == {"args": {}, "attributes": {"steps": 6}}


def test_every_missing_argument_and_method_is_named(transformers):
    page = (ladder.ROOT / "common" / "trainer" / "DIFFERENCES.md").read_text()
    _, _, section = page.partition("## What a program may not expect")
    points = [set(re.findall(r"`(\w+)`", point)) for point in section.split("\n- ")]

    def missing(names_of):
        return names_of(transformers) - names_of(trainer)

    methods = missing(lambda library: {name for name in dir(library.Trainer) if name[0] != "_"})
    arguments = missing(lambda library: {field.name for field in fields(library.TrainingArguments)})
    assert methods and any(methods <= point for point in points)
    assert arguments and any(arguments <= point for point in points)
