"""The two objects that callbacks get: where a run stands, and the switches that steer it."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch


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
        """Take over what a run has come to. The other fields are settings, which may have changed since."""
        self.epoch = saved.epoch
        self.global_step = saved.global_step
        self.log_history = saved.log_history
        self.best_metric = saved.best_metric
        self.best_global_step = saved.best_global_step
        self.best_model_checkpoint = saved.best_model_checkpoint

    def save_to_json(self, json_path: str) -> None:
        """Write all fields to a file; arrays and tensors among the logged values become lists."""
        text = json.dumps(asdict(self), indent=2, sort_keys=True, default=as_json)
        Path(json_path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load_from_json(cls, json_path: str) -> "TrainerState":
        """Read a state that `save_to_json` wrote."""
        return cls(**json.loads(Path(json_path).read_text(encoding="utf-8")))


@dataclass
class TrainerControl:
    """The switches of a run. A callback sets them; the Trainer obeys after each step and each epoch."""

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False
