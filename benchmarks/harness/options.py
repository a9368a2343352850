"""The options and the batches of suites, the time-out of a job, and the error of a suite that cannot run here."""

import os
from pathlib import Path
from typing import NamedTuple

from common.data import mnist_on_disk

BATCH_SIZES = (64, 256)  # --quick, and a comparison without --full, have the first alone
TIMEOUT_SECONDS = 900  # of a job on ranks: only one that hangs takes so long


class MeasureOptions(NamedTuple):
    """The size of a measurement."""

    rounds: int  # how often the rows of a group take turns
    data_flags: tuple[str, ...]  # the levels' flags that name the dataset
    quick: bool  # a few short rounds, to see that everything runs


class CannotMeasure(RuntimeError):
    """This machine lacks what the suite needs; the message says what."""


def find_dataset() -> tuple[str, ...]:
    """The levels' flags for MNIST if it is on disk, else for the synthetic digits; nothing is downloaded."""
    root = Path(os.environ.get("MNIST_ROOT", "data")).resolve()
    if mnist_on_disk(root):
        return ("--dataset", "mnist", "--data-dir", str(root))
    return ("--dataset", "synthetic")
