"""The rows of the tables of `memory` and `measure`: strategies, each on a number of devices."""

from collections.abc import Iterable
from typing import NamedTuple

from benchmarks.harness.rows import ONE_DEVICE
from common.errors import fail


class Setting(NamedTuple):
    """A strategy on so many devices."""

    strategy: str
    devices: int

    @property
    def name(self) -> str:
        return self.strategy if self.devices == 1 else f"{self.strategy}, {self.devices}"


def settings_on(devices: Iterable[int], strategies: Iterable[str]) -> list[Setting]:
    """One device, and then all strategies on every larger number of devices."""
    settings = [Setting(ONE_DEVICE, 1)]
    for count in sorted({*devices} - {1}):
        settings += [Setting(strategy, count) for strategy in strategies]
    return settings


def check_batch(batch: int, devices: Iterable[int]) -> None:
    """Raise UserError for a global batch that cannot be divided among one of the numbers of devices."""
    for count in devices:
        if batch % count:
            fail(f"argument --batch: {batch} samples cannot be divided among {count} devices")
