"""The options, batch sizes, warm-up and time-out that suites share, and the error of one that cannot run here."""

from typing import NamedTuple

BATCH_SIZES = (64, 256)  # --quick, and a comparison without --full, have the first alone
TIMEOUT_SECONDS = 900  # of a job on ranks: only one that hangs takes so long
WARM_UP_STEPS = 2  # not timed: from the second step on DDP has its final buckets


class MeasureOptions(NamedTuple):
    """What the caller of a suite chooses."""

    rounds: int  # how often the rows of a group take turns
    data_flags: tuple[str, ...]  # the levels' flags that name the dataset
    quick: bool  # a few short rounds, to see that everything runs


class CannotMeasure(RuntimeError):
    """This machine lacks what the suite needs; the message says what."""
