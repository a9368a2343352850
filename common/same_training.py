"""Refusals of a training that resumes with other settings than it began with."""

import math
from typing import Any

from common.errors import fail


class SameTraining:
    """Settings that a checkpoint keeps. A training that resumed with others would repeat samples or skip some.

    Args:
        batch_size: the global batch.
        train_set: of `common.data.load_data`.
    """

    def __init__(self, batch_size: int, train_set: Any) -> None:
        # By the names that the user knows them by.
        self.settings = {"--batch-size": batch_size, "--dataset": train_set.name, "training samples": len(train_set)}

    def state_dict(self) -> dict[str, Any]:
        """The settings."""
        return self.settings

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Raise UserError if the settings of the checkpoint differ."""
        for name, value in self.settings.items():
            if saved[name] != value:
                fail(f"{name} {value}: the checkpoint is of a training with {saved[name]}")


def refuse_longer_training(epochs: int, step: int, steps_per_epoch: int) -> None:
    """Raise UserError if a checkpoint of optimizer step `step` is of a training with more than `epochs` epochs."""
    if step > epochs * steps_per_epoch:
        epoch = math.ceil(step / steps_per_epoch)
        fail(f"--epochs {epochs}: the checkpoint is of a longer training, in its epoch {epoch}")
