"""Strategies to train one network, each on a number of devices: the rows of the tables of `memory` and `measure`."""

import argparse
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.harness.rows import DATA_PARALLEL, DDP, ONE_DEVICE
from common.errors import fail
from common.flag_types import positive

ZERO_1 = "ZeRO-1"
ZERO_2 = "ZeRO-2"
ZERO_3 = "ZeRO-3 / FSDP"
PARALLEL_STRATEGIES = (DATA_PARALLEL, DDP, ZERO_1, ZERO_2, ZERO_3)


class Setting(NamedTuple):
    """A strategy on so many devices: ONE_DEVICE on one, or one of PARALLEL_STRATEGIES on several."""

    strategy: str
    devices: int

    @property
    def name(self) -> str:
        return self.strategy if self.devices == 1 else f"{self.strategy}, {self.devices}"


def add_global_batch(parser: argparse.ArgumentParser) -> None:
    about = "global batch: samples of a step on all devices together (64)"
    parser.add_argument("--batch", type=positive, default=64, metavar="N", help=about)


def settings_for(batch: int, devices: Sequence[int], strategies: Sequence[str]) -> list[Setting]:
    """One device, and then all strategies on every larger number of devices, for a global batch.

    Raises UserError if the batch cannot be divided among one of the numbers of devices.
    """
    for count in devices:
        if batch % count:
            fail(f"argument --batch: {batch} samples cannot be divided among {count} devices")
    settings = [Setting(ONE_DEVICE, 1)]
    for count in sorted({*devices} - {1}):
        settings += [Setting(strategy, count) for strategy in strategies]
    return settings
