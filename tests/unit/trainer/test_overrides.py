"""Overrides of a script are called as by transformers, and its training ends the same, bit for bit."""

import os

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import SequentialSampler

from tests.bits import comparable
from tests.toys import Points, seeded_net
from tests.unit.trainer.both import end, make, same_on_both

pytestmark = pytest.mark.usefixtures("transformers")


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
                self._move_model_to_device(teacher, self.args.device)
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
        teacher = seeded_net()
        extra = {"train_dataset": Numbered(22)}
        trainer = make(library, folder, trainer_class=Own, extra=extra, max_steps=2, save_strategy="epoch")
        trainer.train()
        asked = trainer.is_in_train, trainer._get_learning_rate(), list(trainer._get_train_sampler())
        return calls, asked, os.listdir(f"{folder}/None"), end(trainer)

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
