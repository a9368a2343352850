"""Observations that are compared with each other: one of each rank."""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple, TypeVar

from common.doctor.record import Epoch, Network, Record

T = TypeVar("T")
Rates = list[float | None]  # those of an optimizer step, one for each parameter group
NO_NUMBERS = "the samples have no numbers, or the ranks have data sets of different sizes"


def across_ranks(of_ranks: Iterable[list[T]]) -> list[tuple[T, ...]]:
    """The first of each rank, then the second of each, and so on, as far as all ranks have one."""
    return list(zip(*of_ranks, strict=False))


def training_epochs(record: Record) -> list[Epoch]:
    """The epochs with forwards in training."""
    return [epoch for epoch in record.epochs if any(batch.forwards for batch in epoch.batches)]


def evaluations(record: Record) -> list[Epoch]:
    """The epochs in which a network is called, never in training, and no optimizer makes a step between two batches."""
    found = []
    for epoch in record.epochs:
        is_used = any(batch.is_used for batch in epoch.batches)
        is_trained_on = any(batch.forwards for batch in epoch.batches)
        if is_used and not is_trained_on and epoch.batches[0].steps == epoch.batches[-1].steps:
            found.append(epoch)
    return found


class UnevenEpoch(NamedTuple):
    """An epoch that has ended on one rank, and goes on on another one."""

    number: int
    batches: list[int]  # the number that each rank has used
    steps: int  # the number of optimizer steps before the last batch of the rank that has ended

    def batches_by_rank(self) -> str:
        """For example "rank 0 has 9 batches, rank 1 has 8 batches"."""
        return ", ".join(f"rank {rank} has {count} batches" for rank, count in enumerate(self.batches))


def uneven_epoch(of_ranks: Iterable[list[Epoch]]) -> UnevenEpoch | None:
    """The first uneven one among the epochs of all ranks."""
    for number, epochs in enumerate(across_ranks(of_ranks)):
        batches = [_used_batches(epoch) for epoch in epochs]
        shortest = epochs[batches.index(min(batches))]
        if shortest.complete and max(batches) > min(batches):
            return UnevenEpoch(number, batches, shortest.batches[-1].steps)
    return None


def _used_batches(epoch: Epoch) -> int:
    """The number of its batches up to the last one that was used: a script may read one more in vain."""
    used = [number for number, batch in enumerate(epoch.batches, start=1) if batch.is_used]
    return max(used, default=0)


def corresponding_steps(records: list[Record]) -> int:
    """The number of the first optimizer steps that all ranks have made together.

    Rank 0 has 9 batches, and rank 1 has 8. Under Join rank 0 makes its ninth step alone, and rank 1's ninth step is the
    first of the next epoch. So the steps correspond until the last batch of rank 1 is read.
    """
    steps = min(len(record.steps) for record in records)
    uneven = uneven_epoch(map(training_epochs, records))
    return steps if uneven is None else min(steps, uneven.steps)


def are_numbered_alike(epochs: tuple[Epoch, ...]) -> bool:
    """True if the samples have numbers, in data sets that are equally long on all ranks.

    Else NO_NUMBERS is the reason for not comparing them.
    """
    sizes = {epoch.size for epoch in epochs}
    return len(sizes) == 1 and None not in sizes and all(epoch.samples for epoch in epochs)


def trained_networks(records: list[Record]) -> list[tuple[Network, ...]]:
    """The networks that all ranks have trained: for each the observations of all ranks."""
    of_ranks = [[network for network in record.networks if network.forwards] for record in records]
    same = []
    for networks in across_ranks(of_ranks):
        shapes = {(network.kind, network.parameter_count) for network in networks}
        if len(shapes) == 1:
            same.append(networks)
    return same


def steps_with_different_rates(records: list[Record]) -> list[int]:
    """The optimizer steps, from 0 on, at which not all ranks have the same learning rates."""
    different = []
    for number in range(corresponding_steps(records)):
        rates = [record.steps[number].learning_rates for record in records]
        if rates != rates[:1] * len(rates):
            different.append(number)
    return different


def changing_rates(record: Record) -> list[list[Rates]]:
    """The learning rates, step by step, of each optimizer for which they change."""
    by_optimizer = defaultdict(list)
    for step in record.steps:
        by_optimizer[step.optimizer].append(step.learning_rates)
    return [rates for rates in by_optimizer.values() if any(of_step != rates[0] for of_step in rates)]
