"""The names that scripts and overrides read from transformers' Trainer: there, and with the same values."""

import pytest
import torch

from tests.unit.trainer.both import end, make, same_on_both

pytestmark = pytest.mark.usefixtures("transformers")


def test_arguments_say_which_process_this_is(tmp_path):
    def script(library, folder):
        args = library.TrainingArguments(folder, use_cpu=True)
        return args.device, args.process_index, args.world_size, args.should_save

    assert same_on_both(script, tmp_path) == (torch.device("cpu"), 0, 1, True)


def test_an_override_of_evaluate_tells_the_callbacks_itself(tmp_path):
    def script(library, folder):
        seen = []

        class Watch(library.TrainerCallback):
            def on_evaluate(self, args, state, control, metrics, **kwargs):
                seen.append((state.global_step, metrics["eval_extra"], sorted(kwargs)))
                seen.append(kwargs["eval_dataloader"] is trainer.callback_handler.eval_dataloader)
                control.should_training_stop = state.global_step >= 6

        class Own(library.Trainer):
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

        trainer = make(library, folder, Own, {"callbacks": [Watch]}, eval_strategy="epoch", num_train_epochs=3)
        trainer.train()
        logged = end(trainer)
        trainer.evaluate()
        return seen, logged

    ours = same_on_both(script, tmp_path)
    assert ours[1]["steps"][0] == 6


def test_an_override_of_log_tells_the_callbacks_itself(tmp_path):
    def script(library, folder):
        seen = []

        class Watch(library.TrainerCallback):
            def on_log(self, args, state, control, logs, **kwargs):
                seen.append(sorted(logs))

        class Own(library.Trainer):
            def log(self, logs, *args):
                self.control = self.callback_handler.on_log(self.args, self.state, self.control, logs)

        trainer = make(library, folder, Own, {"callbacks": [Watch]})
        trainer.train()
        return seen, end(trainer)

    same_on_both(script, tmp_path)


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
