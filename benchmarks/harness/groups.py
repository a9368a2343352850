"""Groups of rows that are measured in turns, so that the rows of a group can be compared with one another."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

SECONDS = {"ms": 1e-3, "µs": 1e-6}


class MeasureOptions(NamedTuple):
    """How much is measured, of every group.

    Attributes:
        rounds: how often the rows take turns.
        data_flags: the levels' flags that name the dataset.
        quick: a few short rounds, to see that everything runs.
    """

    rounds: int
    data_flags: tuple[str, ...]
    quick: bool


class CannotMeasure(RuntimeError):
    """This machine lacks what the group needs; the message says what."""


@dataclass(frozen=True)
class Group:
    """Rows that take turns.

    Attributes:
        key: the name of the suite and of the group in it, for the ids of tests.
        title: the name of the record.
        rows: the names of all its rows. Nothing is started to find them.
        measure: measures them in turns and returns the record of `records.group`, to which it may add keys. It raises
            CannotMeasure where the machine lacks something.
    """

    key: str
    title: str
    rows: tuple[str, ...]
    measure: Callable[[MeasureOptions], dict]


def seconds_per_step(record: dict, row: str) -> list[float]:
    """The seconds that a step of `row` took in each round of a record; its unit is a time, or images per second."""
    unit = record["unit"]
    metadata = record["rows"][row]
    if unit in SECONDS:
        return [sample * SECONDS[unit] for sample in metadata["samples"]]
    return [metadata["global_batch_size"] / sample for sample in metadata["samples"]]
