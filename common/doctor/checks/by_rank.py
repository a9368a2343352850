"""Helpers of several checks: observations that belong together across the ranks, and questions about one rank's."""

from collections import defaultdict
from collections.abc import Iterable
from typing import TypeVar

from common.doctor.record import Epoch, Network, Record, Step

T = TypeVar("T")
Rates = list[float | None]  # those of an optimizer step, one for each parameter group
NO_NUMBERS = "the samples have no numbers, or the ranks have data sets of different sizes"


def across_ranks(of_ranks: Iterable[list[T]]) -> list[tuple[T, ...]]:
    """The first of each rank, then the second of each, and so on, as far as all ranks have one."""
    return list(zip(*of_ranks, strict=False))


def corresponding_steps(records: list[Record]) -> list[tuple[Step, ...]]:
    """The optimizer steps that all ranks make together.

    Under Join they end before the last batch of the rank that has fewer. With a step for each batch:

    rank 0  step 1  step 2  step 3
    rank 1  step 1  step 2          its weights are noted in the next epoch, when it has got those after step 3
    both    step 1
    """
    steps = across_ranks(record.steps for record in records)
    for epochs in across_ranks(record.training_epochs for record in records):
        shortest = ended_with_fewer_batches(epochs)
        if shortest:
            return steps[: shortest.batches[-1].steps]
    return steps


def ended_with_fewer_batches(epochs: tuple[Epoch, ...]) -> Epoch | None:
    """The epoch of the rank that came to its end with fewer batches than another one has read, if there is one."""
    batches = [len(epoch.batches) for epoch in epochs]
    shortest = epochs[batches.index(min(batches))]
    is_uneven = max(batches) > min(batches)
    return shortest if is_uneven and shortest.complete else None


def are_numbered_alike(epochs: tuple[Epoch, ...]) -> bool:
    """True if the samples have numbers, in data sets of one length. Else NO_NUMBERS is the reason for not comparing."""
    lengths = {epoch.data_set_length for epoch in epochs}
    return len(lengths) == 1 and None not in lengths and all(epoch.samples for epoch in epochs)


def has_repeated(samples: list[int]) -> bool:
    return len(set(samples)) < len(samples)


def trained_networks(records: list[Record]) -> list[tuple[Network, ...]]:
    """The networks that all ranks have trained, with the same parameters: for each the observations of all ranks."""
    trained = across_ranks([network for network in record.networks if network.forwards] for record in records)
    return [of_ranks for of_ranks in trained if all(network.shapes == of_ranks[0].shapes for network in of_ranks)]


def have_same_rates(of_ranks: tuple[Step, ...]) -> bool:
    return all(step.learning_rates == of_ranks[0].learning_rates for step in of_ranks)


def changing_rates(record: Record) -> list[list[Rates]]:
    """The learning rates, step by step, of each optimizer for which they change."""
    by_optimizer = defaultdict(list)
    for step in record.steps:
        by_optimizer[step.optimizer].append(step.learning_rates)
    return [rates for rates in by_optimizer.values() if any(of_step != rates[0] for of_step in rates)]
