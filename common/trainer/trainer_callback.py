"""Callbacks: the events of a run, the state that callbacks see, the switches that they set, and two of them."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.files import write_atomically
from common.trainer.training_args import TrainingArguments


def as_json(value: Any) -> Any:
    """A value that JSON can hold in place of `value`: metrics may be arrays, tensors or numbers of NumPy."""
    if isinstance(value, np.ndarray | np.generic | torch.Tensor):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} {value!r} cannot be written as JSON")


@dataclass
class TrainerState:
    """The position and the history of a run; `trainer_state.json` in a checkpoint holds exactly this.

    `epoch` has a fraction within an epoch. The fields that this Trainer never changes (tokens, flos, trials) are there
    for whatever reads the file of `transformers.Trainer`.
    """

    epoch: float = 0
    global_step: int = 0
    max_steps: int = 0
    logging_steps: int = 500
    eval_steps: int = 500
    save_steps: int = 500
    train_batch_size: int | None = None
    num_train_epochs: int = 0
    num_input_tokens_seen: int = 0
    total_flos: float = 0.0
    log_history: list[dict[str, Any]] = field(default_factory=list)
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: dict[str, Any] | None = None
    stateful_callbacks: dict[str, Any] = field(default_factory=dict)

    def go_on_from(self, saved: "TrainerState") -> None:
        """Take over the position and the history of a run. The other fields are settings, which may be new."""
        self.epoch = saved.epoch
        self.global_step = saved.global_step
        self.log_history = saved.log_history
        self.best_metric = saved.best_metric
        self.best_global_step = saved.best_global_step
        self.best_model_checkpoint = saved.best_model_checkpoint

    def save_to_json(self, json_path: str) -> None:
        """Write all fields to a file; arrays and tensors among the logged values become lists."""
        text = json.dumps(asdict(self), indent=2, sort_keys=True, default=as_json)
        write_atomically(json_path, text + "\n")

    @classmethod
    def load_from_json(cls, json_path: str) -> "TrainerState":
        return cls(**json.loads(Path(json_path).read_text(encoding="utf-8")))


@dataclass
class TrainerControl:
    """The switches of a run. A callback sets them; the Trainer obeys after each step and each epoch."""

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False


class TrainerCallback:
    """The events of a run. Override those that you need.

    Every event gets `args` (TrainingArguments), `state` (TrainerState) and `control` (TrainerControl), and by keyword
    `model`, `processing_class`, `optimizer`, `lr_scheduler`, `train_dataloader` and `eval_dataloader`: write the ones
    you need into the signature and `**kwargs` for the rest. `on_log` also gets `logs`, `on_evaluate` and `on_predict`
    get `metrics`, which are dicts. A callback changes the run through `control`, and may return it. All ranks call it.

    A callback that must survive a restart has a method `state`, which returns {"args": {…}, "attributes": {…}}, of JSON
    values: the arguments of `__init__`, and attributes that have changed since and are set again when training resumes.
    """

    def on_init_end(self, args, state, control, **kwargs):
        """The Trainer has been made."""

    def on_train_begin(self, args, state, control, **kwargs):
        """Training is about to begin. A checkpoint is loaded, but its random states only if no batches are skipped."""

    def on_train_end(self, args, state, control, **kwargs):
        """Training is over; the best model has been loaded if asked for."""

    def on_epoch_begin(self, args, state, control, **kwargs):
        """An epoch begins, or goes on after a restart."""

    def on_epoch_end(self, args, state, control, **kwargs):
        """An epoch is over, or was cut short."""

    def on_step_begin(self, args, state, control, **kwargs):
        """The micro-batches of an optimizer step are about to be used."""

    def on_substep_end(self, args, state, control, **kwargs):
        """A micro-batch is done, other than the last of its step."""

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        """The gradients are complete and clipped."""

    def on_optimizer_step(self, args, state, control, **kwargs):
        """The optimizer has stepped; the gradients are still there."""

    def on_step_end(self, args, state, control, **kwargs):
        """A step is done."""

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        """An evaluation is done."""

    def on_predict(self, args, state, control, metrics, **kwargs):
        """A prediction is done."""

    def on_prediction_step(self, args, state, control, **kwargs):
        """A batch of an evaluation or prediction is done."""

    def on_save(self, args, state, control, **kwargs):
        """A checkpoint is complete."""

    def on_log(self, args, state, control, logs, **kwargs):
        """Values have been logged."""


# The keywords that callbacks get at every event.
GIVEN = ("model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")

# The switches that are off again when an event begins: their work is done, or it belonged to a step that is over.
SWITCHED_OFF = {
    "on_train_begin": ("should_training_stop", "should_epoch_stop", "should_log", "should_evaluate", "should_save"),
    "on_epoch_begin": ("should_epoch_stop",),
    "on_step_begin": ("should_log", "should_evaluate", "should_save"),
    "on_log": ("should_log",),
    "on_evaluate": ("should_evaluate",),
    "on_save": ("should_save",),
}


class CallbackHandler:
    """The callbacks, in the order in which they are called, and the objects that they get."""

    def __init__(
        self, callbacks: list[Any], model: Any, processing_class: Any, optimizer: Any, lr_scheduler: Any
    ) -> None:
        # The Trainer renews these before each training.
        self.model = model
        self.processing_class = processing_class
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.train_dataloader: Any = None
        self.eval_dataloader: Any = None
        self.callbacks: list[Any] = []
        for callback in callbacks:
            self.add_callback(callback)

    def call_event(
        self, event: str, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Tell all callbacks; returns the control that they leave, which may be another object."""
        for switch in SWITCHED_OFF.get(event, ()):
            setattr(control, switch, False)
        kwargs |= {name: getattr(self, name) for name in GIVEN}
        for callback in self.callbacks:
            changed = getattr(callback, event)(args, state, control, **kwargs)
            if changed is not None:
                control = changed
        return control

    def on_log(self, args, state, control, logs):
        """Tell that values have been logged, from an override of the Trainer's `log`."""
        return self.call_event("on_log", args, state, control, logs=logs)

    def on_evaluate(self, args, state, control, metrics):
        """Tell that an evaluation is done, from an override of the Trainer's `evaluate`."""
        return self.call_event("on_evaluate", args, state, control, metrics=metrics)

    def on_prediction_step(self, args, state, control):
        """Tell that a batch of an evaluation is done, from a copy of the original's `evaluation_loop`."""
        return self.call_event("on_prediction_step", args, state, control)

    def add_callback(self, callback: Any) -> None:
        """Add a callback, or a new instance of a callback class. During an event, it gets that event too."""
        self.callbacks.append(callback() if isinstance(callback, type) else callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove and return the callback, or the first of a class; None if there is none."""
        for candidate in self.callbacks:
            if candidate is callback or (isinstance(callback, type) and isinstance(candidate, callback)):
                # A new list: one that removes itself during an event costs no other callback the event.
                self.callbacks = self.callbacks.copy()
                self.callbacks.remove(candidate)
                return candidate
        return None

    def remove_callback(self, callback: Any) -> None:
        self.pop_callback(callback)

    def states(self, control: TrainerControl) -> dict[str, Any]:
        """The states of the callbacks that have one, by class name; a list where several share the name.

        The switches are among them for programs that read the file of `transformers`. `restore` leaves them alone.
        """
        states: dict[str, Any] = {"TrainerControl": [{"args": asdict(control), "attributes": {}}]}
        for callback in self.callbacks:
            if callable(getattr(callback, "state", None)):
                states.setdefault(type(callback).__name__, []).append(callback.state())
        for name, found in states.items():
            if len(found) == 1:
                states[name] = found[0]
        return states

    def restore(self, states: dict[str, Any]) -> None:
        """Give the attributes that `states` returned back to the callbacks of the same classes, in their order."""
        for name, found in states.items():
            of_this_class = [callback for callback in self.callbacks if type(callback).__name__ == name]
            saved = found if isinstance(found, list) else [found]
            for callback, state in zip(of_this_class, saved, strict=False):  # a script may have added or removed some
                for attribute, value in state["attributes"].items():
                    setattr(callback, attribute, value)


class DefaultFlowCallback(TrainerCallback):
    """Logs, evaluates, saves and stops when the arguments say so."""

    def on_step_end(self, args, state, control, **kwargs):
        step = state.global_step
        is_last = step >= state.max_steps
        if args.logging_strategy == "steps" and step % state.logging_steps == 0:
            control.should_log = True
        if args.logging_first_step and step == 1:
            control.should_log = True
        if args.eval_strategy == "steps" and (step % state.eval_steps == 0 or is_last) and step >= args.eval_delay:
            control.should_evaluate = True
        if args.save_strategy == "steps" and (step % state.save_steps == 0 or is_last):
            control.should_save = True
        if is_last:
            control.should_training_stop = True

    def on_epoch_end(self, args, state, control, **kwargs):
        if args.logging_strategy == "epoch":
            control.should_log = True
        if args.eval_strategy == "epoch" and state.epoch >= args.eval_delay:
            control.should_evaluate = True
        if args.save_strategy == "epoch":
            control.should_save = True


class EarlyStoppingCallback(TrainerCallback):
    """Stops training when the metric for the best model has not improved in `early_stopping_patience` evaluations.

    An improvement by `early_stopping_threshold` or less counts as none.
    """

    def __init__(self, early_stopping_patience: int = 1, early_stopping_threshold: float = 0.0) -> None:
        self.early_stopping_patience = early_stopping_patience
        self.early_stopping_threshold = early_stopping_threshold
        self.early_stopping_patience_counter = 0

    def on_train_begin(self, args, state, control, **kwargs):
        if args.metric_for_best_model is None or args.eval_strategy == "no":
            raise ValueError("EarlyStoppingCallback needs metric_for_best_model and an eval_strategy")
        if state.global_step > 0:
            # A run that it stopped stays stopped when it is resumed.
            self._stop_without_patience(control)

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        metric = metrics.get(str(args.best_metric_key))
        if metric is None:  # one of several evaluation sets, and not the one to watch
            return
        self.check_metric_value(args, state, control, metric)
        self._stop_without_patience(control)

    def check_metric_value(self, args, state, control, metric_value):
        """Count an evaluation that is no improvement; scripts override this."""
        best = state.best_metric  # the Trainer updates it after this event
        is_better = np.greater if args.greater_is_better else np.less
        threshold = self.early_stopping_threshold
        if best is None or (is_better(metric_value, best) and abs(metric_value - best) > threshold):
            self.early_stopping_patience_counter = 0
        else:
            self.early_stopping_patience_counter += 1

    def _stop_without_patience(self, control: TrainerControl) -> None:
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True

    def state(self) -> dict[str, Any]:
        """The evaluations without improvement so far, for a checkpoint."""
        return {
            "args": {
                "early_stopping_patience": self.early_stopping_patience,
                "early_stopping_threshold": self.early_stopping_threshold,
            },
            "attributes": {"early_stopping_patience_counter": self.early_stopping_patience_counter},
        }
