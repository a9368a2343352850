"""The names that scripts and overrides read from transformers' Trainer: there, and with the same values."""

from pathlib import Path

import pytest
import torch

from tests.unit.trainer.both import end, make, same_on_both

pytestmark = pytest.mark.usefixtures("transformers")


def test_arguments_say_which_process_this_is(tmp_path):
    def script(library, folder):
        args = library.TrainingArguments(folder, use_cpu=True)
        with args.main_process_first(desc="work"):
            pass
        with args.main_process_first(local=False):
            pass
        return (
            args.device,
            args.process_index,
            args.local_process_index,
            args.should_save,
            args.should_log,
            args.parallel_mode.value,
            args.ddp_timeout_delta,
            args.get_process_log_level(),
        )

    ours = same_on_both(script, tmp_path)
    assert ours[0] == torch.device("cpu")


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
                metrics = output.metrics | {"eval_extra": float(self.is_in_train)}
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
    assert ours[0][-2][1] == 0.0  # the evaluation after the training


@pytest.mark.parametrize("event", ["on_log", "on_predict", "on_prediction_step"])
def test_an_override_can_tell_other_events(event, tmp_path):
    def script(library, folder):
        seen = []

        class Watch(library.TrainerCallback):
            pass

        def listen(self, args, state, control, logs=None, metrics=None, **kwargs):
            seen.append((logs, metrics, kwargs["model"] is trainer.model))
            control.should_save = True

        setattr(Watch, event, listen)
        trainer = make(library, folder, extra={"callbacks": [Watch]})
        values = [] if event == "on_prediction_step" else [{"value": 1.0}]
        tell = getattr(trainer.callback_handler, event)
        trainer.control = tell(trainer.args, trainer.state, trainer.control, *values)
        trainer.callback_handler.remove_callback(Watch)
        tell(trainer.args, trainer.state, trainer.control, *values)
        return seen, trainer.control.should_save

    ours = same_on_both(script, tmp_path)
    assert len(ours[0]) == 1


def test_a_callback_may_derive_from_exportable_state(tmp_path):
    def script(library, folder):
        from transformers.trainer_callback import ExportableState

        base = getattr(library, "ExportableState", ExportableState)

        class Counter(library.TrainerCallback, base):
            steps = 0

            def on_step_end(self, args, state, control, **kwargs):
                self.steps += 1

            def state(self):
                return {"args": {}, "attributes": {"steps": self.steps}}

        trainer = make(library, folder, extra={"callbacks": [Counter]}, save_strategy="steps", save_steps=2)
        trainer.train()
        return trainer.state.stateful_callbacks["Counter"]

    assert same_on_both(script, tmp_path) == {"args": {}, "attributes": {"steps": 6}}


def test_copies_of_the_originals_methods_find_what_they_ask_for(tmp_path):
    def script(library, folder):
        class Own(library.Trainer):
            def _prepare_inputs(self, inputs):
                inputs = super()._prepare_inputs(inputs)
                return {**inputs, "x": inputs["x"] + 1}

            def training_step(self, model, inputs, num_items_in_batch=None):
                model.train()
                inputs = self._prepare_inputs(inputs)
                with self.compute_loss_context_manager(), self.autocast_smart_context_manager():
                    loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
                self.accelerator.backward(loss / self.current_gradient_accumulation_steps)
                return loss.detach() / self.current_gradient_accumulation_steps

            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                assert self.is_in_train
                assert self.label_smoother is None
                outputs = model(**inputs)
                return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

        trainer = make(library, folder, Own, gradient_accumulation_steps=2)
        before = trainer.is_in_train
        trainer.train()
        flags = (before, trainer.is_in_train, trainer.is_deepspeed_enabled, trainer.is_fsdp_enabled)
        return flags, end(trainer)

    ours = same_on_both(script, tmp_path)
    assert ours[0] == (False, False, False, False)


def test_an_override_of_save_model_passes_its_arguments_on(tmp_path):
    def script(library, folder):
        class Own(library.Trainer):
            def save_model(self, output_dir=None, _internal_call=False):
                super().save_model(output_dir, _internal_call)

        make(library, folder, Own).save_model(f"{folder}/own")
        return Path(folder, "own", "model.safetensors").exists()

    assert same_on_both(script, tmp_path) is True
