"""Questions about one epoch that its notes answer: does it train or evaluate, and which samples does it read?"""

from common.doctor.record import Batch, Epoch, Record


def training_epochs(record: Record) -> list[Epoch]:
    return [epoch for epoch in record.epochs if has_forwards(epoch) and has_steps(epoch)]


def evaluations(record: Record) -> list[Epoch]:
    return [epoch for epoch in record.epochs if is_evaluation(epoch)]


def is_evaluation(epoch: Epoch) -> bool:
    was_evaluated = any(batch.evaluated for batch in epoch.batches)
    return was_evaluated and not has_forwards(epoch) and not has_steps(epoch)


def has_forwards(epoch: Epoch) -> bool:
    """True if a network was called in training with a batch, as also in a dry run."""
    return any(batch.forwards for batch in epoch.batches)


def has_steps(epoch: Epoch) -> bool:
    """True if an optimizer stepped between two batches, which one batch alone cannot show."""
    return epoch.batches[-1].steps > epoch.batches[0].steps


def indices_of(epoch: Epoch) -> list[int]:
    return [index for batch in epoch.batches for index in batch.indices]


def size_of(batch: Batch) -> int:
    return len(batch.indices or batch.contents)
