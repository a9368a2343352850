"""What callbacks see and do: the state of a run, the switches that steer it, the events, and two standard callbacks."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class TrainerState:
    """Where a run stands; `trainer_state.json` in a checkpoint holds exactly this.

    Steps are optimizer steps. `epoch` counts passes over the training set and has a fraction within one. The fields
    that this Trainer never changes (tokens, flos, trials) stay at their defaults: they are there so that whatever
    reads the file of `transformers.Trainer` reads this one.
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
    total_flos: float = 0
    log_history: list[dict[str, float]] = field(default_factory=list)
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: dict[str, Any] | None = None
    stateful_callbacks: dict[str, Any] = field(default_factory=dict)

    def save_to_json(self, json_path: str) -> None:
        Path(json_path).parent.mkdir(parents=True, exist_ok=True)
        Path(json_path).write_text(json.dumps(asdict(self), indent=2, sort_keys=True) + "\n", encoding="utf-8")

    @classmethod
    def load_from_json(cls, json_path: str) -> "TrainerState":
        return cls(**json.loads(Path(json_path).read_text(encoding="utf-8")))


@dataclass
class TrainerControl:
    """The switches of a run. A callback sets them; the Trainer obeys, after each step and each epoch, and resets them.

    `should_epoch_stop` ends the epoch, `should_training_stop` the training; the others say what they do.
    """

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False


@dataclass
class Progress:
    """What resuming needs to know beyond `TrainerState`. Losses are sums over samples, of all ranks."""

    epoch: int = 0  # to go on with
    batches: int = 0  # of it that are done, on each rank
    epoch_ended: bool = False  # whether what follows an epoch has begun
    loss: float = 0.0  # since the beginning
    samples: int = 0
    logged_loss: float = 0.0  # of these, what has been logged
    logged_samples: int = 0
    learning_rate: float = 0.0  # of the last step, for a log before the next one
    grad_norm: float = 0.0  # likewise; a tensor until it is read from the device


class TrainerCallback:
    """The events of a run. Override those that you need; the others cost nothing.

    Every event gets `args`, `state` and `control`, and by keyword `model`, `optimizer`, `lr_scheduler`,
    `train_dataloader` and `eval_dataloader`: write the ones you need into the signature and `**kwargs` for the rest.
    `on_log` also gets `logs`, `on_evaluate` and `on_predict` get `metrics`. A callback changes the run through
    `control`, and may return it. All ranks call it.

    A callback that must survive a restart has `state() -> {"args": {...}, "attributes": {...}}`, of JSON values: its
    attributes are stored in every checkpoint and set again when training resumes.
    """

    def on_init_end(self, args, state, control, **kwargs):
        """The Trainer has been made."""

    def on_train_begin(self, args, state, control, **kwargs):
        """Training is about to begin; a checkpoint to resume from, and with it the random state, has been loaded."""

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

    def on_evaluate(self, args, state, control, **kwargs):
        """An evaluation is done."""

    def on_predict(self, args, state, control, **kwargs):
        """A prediction is done."""

    def on_prediction_step(self, args, state, control, **kwargs):
        """A batch of an evaluation or prediction is done."""

    def on_save(self, args, state, control, **kwargs):
        """A checkpoint is complete."""

    def on_log(self, args, state, control, **kwargs):
        """Values have been logged."""


EVENTS = tuple(name for name in vars(TrainerCallback) if name.startswith("on_"))


class CallbackHandler:
    """The callbacks in the order they were added, and for each event those of them that override it."""

    def __init__(self, callbacks: list) -> None:
        self.callbacks: list = []
        for callback in callbacks:
            self.add_callback(callback)

    def add_callback(self, callback) -> None:
        """Add a callback, or a new instance of a callback class."""
        self.callbacks.append(callback() if isinstance(callback, type) else callback)
        self._listen()

    def pop_callback(self, callback):
        """Remove and return the callback, or the first of a class; None if there is none."""
        for candidate in self.callbacks:
            if candidate is callback or (isinstance(callback, type) and isinstance(candidate, callback)):
                self.callbacks.remove(candidate)
                self._listen()
                return candidate
        return None

    def _listen(self) -> None:
        self.listeners = {event: [] for event in EVENTS}
        for callback in self.callbacks:
            for event in EVENTS:
                listener = getattr(callback, event, None)
                if listener and getattr(listener, "__func__", None) is not getattr(TrainerCallback, event):
                    self.listeners[event].append(listener)

    def states(self) -> dict[str, Any]:
        """The states of the callbacks that have one, in a list for each class name."""
        states: dict[str, list] = {}
        for callback in self.callbacks:
            if callable(getattr(callback, "state", None)):
                states.setdefault(type(callback).__name__, []).append(callback.state())
        return states

    def restore(self, states: dict[str, Any]) -> None:
        """Set the attributes that `states` returned on the callbacks of the same classes."""
        for name, found in states.items():
            same = [callback for callback in self.callbacks if type(callback).__name__ == name]
            for callback, state in zip(same, found, strict=False):
                for attribute, value in state["attributes"].items():
                    setattr(callback, attribute, value)


class DefaultFlowCallback(TrainerCallback):
    """Logs, evaluates, saves and stops when the arguments say so."""

    def on_step_end(self, args, state, control, **kwargs):
        step, last = state.global_step, state.global_step >= state.max_steps
        control.should_log |= args.logging_strategy == "steps" and step % state.logging_steps == 0
        control.should_evaluate |= args.eval_strategy == "steps" and (step % state.eval_steps == 0 or last)
        control.should_save |= args.save_strategy == "steps" and (step % state.save_steps == 0 or last)
        control.should_training_stop |= last

    def on_epoch_end(self, args, state, control, **kwargs):
        control.should_log |= args.logging_strategy == "epoch"
        control.should_evaluate |= args.eval_strategy == "epoch"
        control.should_save |= args.save_strategy == "epoch"


class EarlyStoppingCallback(TrainerCallback):
    """Stops training when the metric for the best model has not improved in `early_stopping_patience` evaluations.

    An improvement by `early_stopping_threshold` or less counts as none. Needs `metric_for_best_model` and an
    `eval_strategy`, else training raises ValueError.
    """

    def __init__(self, early_stopping_patience: int = 1, early_stopping_threshold: float = 0.0) -> None:
        self.early_stopping_patience = early_stopping_patience
        self.early_stopping_threshold = early_stopping_threshold
        self.early_stopping_patience_counter = 0

    def on_train_begin(self, args, state, control, **kwargs):
        if args.metric_for_best_model is None or args.eval_strategy == "no":
            raise ValueError("EarlyStoppingCallback needs metric_for_best_model and an eval_strategy")
        if state.global_step == 0:
            self.early_stopping_patience_counter = 0
        control.should_training_stop |= self.early_stopping_patience_counter >= self.early_stopping_patience

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        metric = metrics.get(args.best_metric_key)
        if metric is None:  # one of several evaluation sets, and not the one to watch
            return
        best = state.best_metric  # the Trainer updates it after this event
        sign = 1 if args.greater_is_better else -1
        improved = best is None or (metric - best) * sign > self.early_stopping_threshold
        self.early_stopping_patience_counter = 0 if improved else self.early_stopping_patience_counter + 1
        control.should_training_stop |= self.early_stopping_patience_counter >= self.early_stopping_patience

    def state(self) -> dict:
        settings, memory = dict(vars(self)), "early_stopping_patience_counter"
        return {"attributes": {memory: settings.pop(memory)}, "args": settings}
