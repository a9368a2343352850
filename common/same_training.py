"""What must be as before where a training goes on from a checkpoint, because it decides which samples follow."""

from typing import Any

from common.errors import fail


class SameTraining:
    """Settings that a checkpoint keeps, so that no training goes on with others: it would repeat samples, or lose some.

    Args:
        settings: by the names that the user knows them by.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings

    def state_dict(self) -> dict[str, Any]:
        """The settings."""
        return self.settings

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """End with one line if those of a checkpoint are others."""
        for name, value in self.settings.items():
            if saved[name] != value:
                fail(f"{name} {value}: the checkpoint is of a training with {saved[name]}")
