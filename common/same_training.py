"""Settings that must not change when a training resumes, because they decide which samples follow."""

from typing import Any

from common.errors import fail


class SameTraining:
    """Settings that a checkpoint keeps. A training that resumed with others would repeat samples or skip some.

    Args:
        settings: by the names that the user knows them by.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings

    def state_dict(self) -> dict[str, Any]:
        """The settings."""
        return self.settings

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Raise UserError if the settings of the checkpoint differ."""
        for name, value in self.settings.items():
            if saved[name] != value:
                fail(f"{name} {value}: the checkpoint is of a training with {saved[name]}")
