"""Settings that must not change when a training resumes, because they decide which samples follow."""

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
