"""Epochs: each epoch of a training has an order of its own."""

from itertools import pairwise

from common.doctor.answers import Answer, Finding, NotExamined, Right, overall
from common.doctor.checks.by_rank import training_epochs
from common.doctor.record import Record

MIN_SAMPLES = 16  # a shorter epoch may repeat an order by chance


def check_orders(records: list[Record]) -> Answer:
    answers = []
    for record in records:
        epochs = [epoch for epoch in training_epochs(record) if len(epoch.samples) >= MIN_SAMPLES]
        for earlier, later in pairwise(epochs):
            if earlier.loader == later.loader:
                answers.append(_order(record.rank, earlier.samples, later.samples))
    return overall(answers, "no two epochs of a DataLoader were seen")


def _order(rank: int, earlier: list[int], later: list[int]) -> Answer:
    length = min(len(earlier), len(later))
    order = earlier[:length]
    if order == sorted(order):
        return NotExamined("the order is not shuffled")
    if order != later[:length]:
        return Right()
    return Finding(
        f"two epochs have the same order of {length} samples on rank {rank}",
        "call `sampler.set_epoch(epoch)` before each epoch",
        pitfall="set_epoch_forgotten",
    )
