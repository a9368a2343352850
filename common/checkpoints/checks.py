"""Checks of a training with checkpoints: whether there is one, whether it fits, and whether the next may be made."""

import math
from pathlib import Path
from typing import Any

from torch import nn

from common.errors import fail
from common.process_group import all_gather_object


def has_checkpoint(folder: str, pattern: str) -> bool:
    """True if rank 0 finds a path in `folder` that matches: all ranks resume or none does. All must call this."""
    # `recover_newest` has renamed the damaged ones: checkpoint_7.damaged-….
    found = any(".damaged-" not in path.name for path in Path(folder).glob(pattern))
    return all_gather_object(found)[0]


class SameTraining:
    """Settings that a checkpoint keeps. A training that resumed with others would repeat samples or skip some.

    Args:
        batch_size: the global batch.
        seed: of the sample order.
        train_set: of `common.data.load_data`.
    """

    def __init__(self, batch_size: int, seed: int, train_set: Any) -> None:
        self.settings = {"--batch-size": batch_size, "--seed": seed, "--dataset": train_set.name}
        self.settings["training samples"] = len(train_set)

    def state_dict(self) -> dict[str, Any]:
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


def refuse_not_finite(model: nn.Module, step: int) -> None:
    """Raise UserError if a weight is NaN or infinite: a checkpoint of such a model would replace a good one."""
    are_finite = [parameter.isfinite().all() for parameter in model.parameters()]
    if not all(are_finite):
        fail(f"the model's weights are not finite at step {step}: no checkpoint is made of them")
