"""Overrides of a script are called as by transformers, and its training ends the same, bit for bit."""

import os
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.utils.data import SequentialSampler

from common.trainer import Trainer
from common.trainer.setup import NEVER_CALLED
from tests.bits import comparable, with_digests
from tests.states import forget_states
from tests.toys import Points, seeded_net
from tests.unit.trainer.both import end, make, same_on_both
from tests.unit.trainer.toy import make_trainer

pytestmark = pytest.mark.usefixtures("transformers")


class Numbered(Points):
    def __getitem__(self, index):
        return super().__getitem__(index) | {"number": index}


def test_overrides_may_keep_all_columns_and_choose_folder_and_context(tmp_path):
    def script(library, folder):
        class Own(library.Trainer):
            def _get_collator_with_removed_columns(self, data_collator, description):
                calls.append(("collator", description))
                return data_collator

            def compute_loss(self, model, inputs, *args, **kwargs):
                calls.append(("compute_loss", inputs.pop("number").tolist()))
                self._move_model_to_device(teacher, self.args.device)
                return super().compute_loss(model, inputs, *args, **kwargs)

            def compute_loss_context_manager(self):
                stack = super().compute_loss_context_manager()
                stack.enter_context(torch.autocast("cpu", torch.bfloat16))
                return stack

            def _get_output_dir(self, trial):
                return f"{folder}/{trial}"

            def log(self, logs, *args):
                calls.append(("log", self.is_in_train))
                super().log(logs, *args)

        calls = []
        teacher = seeded_net()
        extra = {"train_dataset": Numbered(22)}
        trainer = make(library, folder, trainer_class=Own, extra=extra, max_steps=2, save_strategy="epoch")
        trainer.train()
        return {
            "calls": calls,
            "is_in_train": trainer.is_in_train,
            "learning rate": trainer._get_learning_rate(),
            "order of the samples": list(trainer._get_train_sampler()),
            "checkpoints": os.listdir(f"{folder}/None"),
            "end": end(trainer),
        }

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
                calls.append(("_save_checkpoint", self.state.global_step, model is self.model, trial))
                super()._save_checkpoint(model, trial)

            def prediction_step(self, model, inputs, prediction_loss_only, **kwargs):
                calls.append(("prediction_step", sorted(kwargs)))
                return super().prediction_step(model, inputs, prediction_loss_only, **kwargs)

            def evaluation_loop(self, dataloader, description, *args, **kwargs):
                calls.append(("evaluation_loop", description, kwargs["metric_key_prefix"]))
                calls.append(("prediction_loss_only", kwargs.get("prediction_loss_only")))
                return super().evaluation_loop(dataloader, description, *args, **kwargs)

        saving = {"save_strategy": "steps", "save_steps": 4}
        trainer = make(library, folder, trainer_class=Own, weight_decay=0.5, eval_strategy="epoch", **saving)
        trainer.train()
        output = trainer.predict(Points(5))
        return {"calls": calls, "predicted labels": output.label_ids.tolist(), "end": end(trainer)}

    same_on_both(script, tmp_path)


def test_a_script_puts_functions_in_the_places_of_methods(tmp_path):
    def script(library, folder):
        class Patient(library.EarlyStoppingCallback):
            def check_metric_value(self, args, state, control, metric_value):
                calls.append(("check_metric_value", state.global_step))
                self.early_stopping_patience_counter += state.global_step // 4

        class Own(library.Trainer):
            def evaluate(self, eval_dataset=None, **kwargs):
                calls.append(("evaluate", sorted(kwargs)))
                return super().evaluate(eval_dataset, **kwargs)

        def save_model(output_dir, **kwargs):
            calls.append(("save_model", sorted(kwargs)))
            Path(output_dir).mkdir(exist_ok=True)

        def compute_loss(model, inputs, **kwargs):
            with trainer.compute_loss_context_manager():
                calls.append(("compute_loss", trainer.is_in_train))
                return Own.compute_loss(trainer, model, inputs, **kwargs)

        calls = []
        sets = {"eval_dataset": {"one": Points(4), "two": Points(8)}, "callbacks": [Patient(1)]}
        steps = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
        trainer = make(library, folder, trainer_class=Own, extra=sets, metric_for_best_model="one_loss", **steps)
        trainer.callback_handler.remove_callback(library.PrinterCallback)
        trainer.compute_loss = compute_loss
        trainer.save_model = save_model
        metrics = trainer.train().metrics
        return {"calls": calls, "counts flos": "total_flos" in metrics, "end": end(trainer)}

    ours = same_on_both(script, tmp_path)
    assert {name for name, _ in ours["calls"]} == {"check_metric_value", "evaluate", "save_model", "compute_loss"}
    assert ("save_model", ["_internal_call"]) in ours["calls"]
    assert ours["counts flos"]


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
    class Own(Trainer):
        _maybe_log_save_evaluate = None

    make_trainer(tmp_path, trainer_class=Own, max_steps=1).train()
    assert "does not call _maybe_log_save_evaluate of Own" in caplog.text
    assert [name for name in NEVER_CALLED if hasattr(Trainer, name)] == []


def test_an_override_of_save_writes_into_checkpoints_and_wherever_the_script_saves(tmp_path):
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
        resumed.save_model(f"{folder}/model")
        halves = {name: tensor / 2 for name, tensor in resumed.model.state_dict().items()}
        resumed._save(f"{folder}/halves", state_dict=halves)
        own = {path.parts[-3] for path in Path(folder).rglob("bias.pt")}
        return {name: with_digests(load_file(f"{folder}/{name}/model.safetensors")) for name in own}

    saved = same_on_both(script, tmp_path)
    assert saved.keys() == {"checkpoint-2", "checkpoint-4", "checkpoint-6", "model", "halves"}
    assert saved["checkpoint-6"] == saved["model"] != saved["halves"]


def test_overrides_of_evaluate_and_log_tell_the_callbacks_themselves(tmp_path):
    def script(library, folder):
        seen = []

        class Watch(library.TrainerCallback):
            def on_evaluate(self, args, state, control, metrics, **kwargs):
                seen.append(("on_evaluate", state.global_step, metrics["eval_extra"], sorted(kwargs)))
                assert kwargs["eval_dataloader"] is trainer.callback_handler.eval_dataloader
                control.should_training_stop = state.global_step >= 6

            def on_log(self, args, state, control, logs, **kwargs):
                seen.append(("on_log", sorted(logs)))

        class Own(library.Trainer):
            def log(self, logs, *args):
                self.state.log_history.append(logs)
                self.control = self.callback_handler.on_log(self.args, self.state, self.control, logs)

            def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
                loader = self.get_eval_dataloader(eval_dataset)
                output = self.evaluation_loop(loader, description="Evaluation", metric_key_prefix=metric_key_prefix)
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
        return {"seen": seen, "end of the training": logged}

    ours = same_on_both(script, tmp_path)
    assert ours["end of the training"]["global_step"] == 6, "a callback stops the training within its third epoch"
