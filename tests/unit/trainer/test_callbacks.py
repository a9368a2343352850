"""Callbacks: which events come when, what they get, and how they steer."""

from functools import partial

import pytest

from common.trainer import EarlyStoppingCallback, TrainerCallback
from common.trainer.trainer_callback import GIVEN
from tests.toys import Points
from tests.unit.trainer.both import make, on_both, same_on_both, train
from tests.unit.trainer.toy import EVENTS, At, make_trainer, stop


def test_the_events_of_a_run_are_those_of_transformers(tmp_path, transformers):
    """22 samples in batches of 8: the second step of an epoch has one micro-batch of two."""
    theirs = {name for name in vars(transformers.TrainerCallback) if name.startswith("on_")}
    assert theirs - {"on_push_begin"} == {*EVENTS}

    def script(library, folder):
        events = []

        def note(event, args, state, control, **kwargs):
            events.append((event, {*GIVEN} <= kwargs.keys()))

        callback = library.TrainerCallback()
        for event in EVENTS:
            setattr(callback, event, partial(note, event))
        settings = {"gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 2}
        trainer = make(library, folder, extra={"callbacks": [callback]}, eval_strategy="epoch", **settings)
        trainer.train()
        trainer.predict(Points(3))
        return events

    assert {event for event, _ in same_on_both(script, tmp_path)} == {*EVENTS}


def test_early_stopping(tmp_path):
    def steps(*scores, **options):
        settings = {"eval_strategy": "epoch", "metric_for_best_model": "score", "num_train_epochs": len(scores)}
        extra = {"callbacks": [EarlyStoppingCallback(2, **options)]}
        trainer = make_trainer(tmp_path, evaluate=8, extra=extra, **settings)
        trainer.compute_metrics = lambda prediction: {"score": scores[trainer.state.global_step // 5 - 1]}
        return trainer.train().global_step // 5

    assert steps(1, 2, 3, 4) == 4
    assert steps(1, 3, 2, 2, 9) == 4
    assert steps(1, 3, 2, 4, 1, 1, 9) == 6
    assert steps(1.0, 1.1, 1.2, 9, early_stopping_threshold=0.5) == 3
    with pytest.raises(ValueError, match="metric_for_best_model"):
        make_trainer(tmp_path, extra={"callbacks": [EarlyStoppingCallback]}).train()


def test_a_callback_that_removes_itself_costs_no_other_callback_the_event(tmp_path):
    """In the original the next one is left out."""
    calls = []

    class First(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            calls.append("first")
            trainer.remove_callback(First)

    class Second(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            calls.append("second")

    trainer = make_trainer(tmp_path, max_steps=2, extra={"callbacks": [First, Second]})
    trainer.train()
    assert calls == ["first", "second", "second"]


def test_a_control_that_was_taken_before_the_training_steers_it(tmp_path):
    """A signal handler that is set before the training steers it through the control that it took then."""
    trainer = make_trainer(tmp_path)
    control = trainer.control

    trainer.add_callback(At("on_step_end", 3, lambda given: stop(control)))
    trainer.train()
    assert trainer.control is control and trainer.state.global_step == 3


@pytest.mark.parametrize(
    "event", ["on_train_begin", "on_epoch_begin", "on_step_begin", "on_substep_end", "on_epoch_end"]
)
@pytest.mark.parametrize("switch", ["should_training_stop", "should_epoch_stop"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_stop_acts_at_the_same_moment(event, switch, accumulation, tmp_path, transformers):
    def script(library, folder):
        def stop(self, args, state, control, **kwargs):
            setattr(control, switch, True)

        stopper = type("Stopper", (library.TrainerCallback,), {event: stop})
        settings = {"gradient_accumulation_steps": accumulation, "eval_strategy": "epoch"}
        return train(library, folder, extra={"callbacks": [stopper]}, **settings)

    same_on_both(script, tmp_path)


def test_a_callback_that_changes_the_accumulation_loses_no_sample(tmp_path, transformers):
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


def test_a_callback_with_a_state_is_in_checkpoints(tmp_path, transformers):
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
