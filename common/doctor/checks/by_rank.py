"""Observations that are compared with each other: one of each rank."""

from collections.abc import Iterable
from typing import TypeVar

from common.doctor.record import Epoch, Network, Record

T = TypeVar("T")


def across_ranks(of_ranks: Iterable[list[T]]) -> list[tuple[T, ...]]:
    """The first of each rank, then the second of each, and so on, as far as all ranks have one."""
    return list(zip(*of_ranks, strict=False))


def training_epochs(record: Record) -> list[Epoch]:
    """The epochs with forwards in training."""
    return [epoch for epoch in record.epochs if epoch.forwards]


def evaluations(record: Record) -> list[Epoch]:
    """The epochs without a forward in training."""
    return [epoch for epoch in record.epochs if not epoch.forwards]


def why_not_comparable(epochs: tuple[Epoch, ...]) -> str | None:
    """The reason for which the ranks' samples cannot be compared by their numbers; None if they can."""
    if any(epoch.samples is None or epoch.size is None for epoch in epochs):
        return "the samples have no numbers"
    if len({epoch.size for epoch in epochs}) > 1:
        return "the ranks have data sets of different sizes"
    return None


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
    for number, steps in enumerate(across_ranks(record.steps for record in records)):
        if any(step.learning_rates != steps[0].learning_rates for step in steps):
            different.append(number)
    return different
