"""Where a run stands, the switches that steer it, and what resuming it needs to know."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch


def as_json(value: Any) -> Any:
    """What JSON can hold in place of `value`: metrics may be arrays, tensors or numbers of NumPy."""
    if isinstance(value, np.ndarray | np.generic | torch.Tensor):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} {value!r} cannot be written as JSON")


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

    def save_to_json(self, json_path: str) -> None:
        """Write all fields to a file; arrays and tensors among the logged values become lists."""
        text = json.dumps(asdict(self), indent=2, sort_keys=True, default=as_json)
        path = Path(json_path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load_from_json(cls, json_path: str) -> "TrainerState":
        """Read a state that `save_to_json` wrote."""
        text = Path(json_path).read_text(encoding="utf-8")
        return cls(**json.loads(text))


@dataclass
class TrainerControl:
    """The switches of a run. A callback sets them; the Trainer obeys after each step and each epoch.

    `should_epoch_stop` ends the epoch, `should_training_stop` the training; the others say what they do.
    """

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False


@dataclass
class Progress:
    """What resuming needs to know beyond `TrainerState`; `trainer_state.json` holds it among the callbacks' states.

    Attributes:
        epoch: the epoch to go on with, counted from 0.
        batches: how many micro-batches of it are done, on each rank.
        epoch_ended: whether what follows an epoch has begun.
        epoch_stopped: whether a callback has ended the epoch early.
        carried_batches: how many micro-batches at the end of the epoch before were too few for a step. Their gradients
            become a part of the next step.
        batches_per_epoch, samples_per_batch, accumulation: what `batches` counts, the samples over all ranks. A run
            with other values cannot go on from it.
        total_loss: the sum of the steps' losses that have been logged.
        loss_since_log: on each rank, the sum of the micro-batches' losses since then.
        logged_step: the step at which losses were last logged.
        learning_rate, grad_norm: of the last step, for a log that comes before the next step. The norm is a tensor
            until it is read from the device.
        saved_steps: the steps of which this run has saved a checkpoint. Others in the folder are another run's.
    """

    epoch: int = 0
    batches: int = 0
    epoch_ended: bool = False
    epoch_stopped: bool = False
    carried_batches: int = 0
    batches_per_epoch: int = 0
    samples_per_batch: int = 0
    accumulation: int = 1
    total_loss: float = 0.0
    loss_since_log: list[float] = field(default_factory=list)
    logged_step: int = 0
    learning_rate: float | None = None
    grad_norm: Any = None
    saved_steps: list[int] = field(default_factory=list)

    @property
    def batches_of_open_step(self) -> int:
        """How many micro-batches of the last step are done, if it is not complete; 0 if it is."""
        if self.batches == self.batches_per_epoch:
            return 0
        return self.batches % self.accumulation

    @property
    def is_within_step(self) -> bool:
        """Whether the last step is not complete: a callback has stopped the training between its micro-batches."""
        return self.batches_of_open_step != 0

    def go_back_to_whole_step(self) -> None:
        """Take back the micro-batches of a step that is not complete.

        Their gradients have been added to those that were carried, so the latter are lost with them.
        """
        if self.is_within_step:
            self.batches -= self.batches_of_open_step
            self.carried_batches = 0

    def counts_like(self, other: "Progress") -> bool:
        """Whether `batches` of both mean the same samples."""
        own = (self.batches_per_epoch, self.samples_per_batch, self.accumulation)
        return own == (other.batches_per_epoch, other.samples_per_batch, other.accumulation)
