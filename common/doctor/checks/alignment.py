"""The observations that belong together across the ranks: their epochs, steps and networks, one after the other."""

from collections.abc import Iterable
from typing import NamedTuple, TypeVar

from common.doctor.checks.epochs import indices_of, training_epochs
from common.doctor.record import Epoch, Network, Record, Step
from common.doctor.results import Passed, Result, Skipped

T = TypeVar("T")
NO_INDICES = "the samples have no indices, or the ranks have datasets of different sizes"


def across_ranks(of_ranks: Iterable[list[T]]) -> list[tuple[T, ...]]:
    """The first of each rank, then the second of each, and so on, as far as all ranks have one."""
    return list(zip(*of_ranks, strict=False))


def are_indexed_alike(epochs: tuple[Epoch, ...]) -> bool:
    """True if the samples have indices, in datasets of one length. Else NO_INDICES is the reason for not comparing."""
    lengths = {epoch.dataset_length for epoch in epochs}
    return len(lengths) == 1 and None not in lengths and all(map(indices_of, epochs))


class UnevenEpoch(NamedTuple):
    number: int
    counts: str  # "rank 0 has 9 batches, rank 1 has 8 batches"
    steps_before_last_batch: int  # optimizer steps of the rank that has fewest batches


def first_uneven(of_ranks: Iterable[list[Epoch]]) -> UnevenEpoch | None:
    """The first epoch in which a rank has come to its end with fewer batches than another rank has read."""
    for number, epochs in enumerate(across_ranks(of_ranks)):
        batches = [len(epoch.batches) for epoch in epochs]
        shorter = [epoch for epoch in epochs if epoch.complete and len(epoch.batches) < max(batches)]
        if shorter:
            counts = [f"rank {rank} has {count} batches" for rank, count in enumerate(batches)]
            return UnevenEpoch(number, ", ".join(counts), min(epoch.batches[-1].steps for epoch in shorter))
    return None


def corresponding_steps(records: list[Record]) -> list[tuple[Step, ...]]:
    """The optimizer steps that all ranks make together: those before the last batch of a rank that has fewer batches.

    The weights after a step are noted at the next forward. After its last step the shorter rank has none before the end
    of Join, which gives it the final weights. In later epochs the ranks' steps have different numbers.
    """
    steps = across_ranks(record.steps for record in records)
    uneven = first_uneven(map(training_epochs, records))
    return steps[: uneven.steps_before_last_batch] if uneven else steps


def no_difference(records: list[Record]) -> Result:
    """The result where the ranks do not differ at corresponding steps: Passed if these are all steps."""
    compared = len(corresponding_steps(records))
    made = max(len(record.steps) for record in records)
    if compared < made:
        return Skipped(f"the ranks make only the first {compared} of {made} steps together, and these are alike")
    return Passed()


def trained_networks(records: list[Record]) -> list[tuple[Network, ...]]:
    """The networks that all ranks have trained, with the same parameters: for each the observations of all ranks."""
    trained = across_ranks([network for network in record.networks if network.forwards] for record in records)
    return [of_ranks for of_ranks in trained if all(network.shapes == of_ranks[0].shapes for network in of_ranks)]
