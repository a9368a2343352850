"""Epochs: each epoch of a training has an order of its own, and in an evaluation each sample counts once."""

from collections import Counter
from itertools import chain, pairwise

from common.doctor.answers import Answer, Finding, NotExamined, Right, overall
from common.doctor.checks.by_rank import across_ranks, evaluations, training_epochs, why_not_comparable
from common.doctor.record import Epoch, Record

MIN_SAMPLES = 16  # a shorter epoch may repeat an order by chance


def check_orders(records: list[Record]) -> Answer:
    answers = []
    for record in records:
        epochs = [epoch for epoch in training_epochs(record) if len(epoch.samples or []) >= MIN_SAMPLES]
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


def check_evaluation_samples(records: list[Record]) -> Answer:
    whole = [[epoch for epoch in evaluations(record) if epoch.complete] for record in records]
    answers = []
    for number, epochs in enumerate(across_ranks(whole)):
        answers.append(_evaluation(number, epochs))
    return overall(answers, "no evaluation was seen whole on all ranks")


def _evaluation(number: int, epochs: tuple[Epoch, ...]) -> Answer:
    if not all(epoch.dealt_out_by_torch for epoch in epochs):
        reason = "a library deals out the samples, and may drop those that it repeats when metrics are gathered"
        return NotExamined(reason)
    reason = why_not_comparable(epochs)
    if reason:
        return NotExamined(reason)
    reads = Counter(chain.from_iterable(epoch.samples for epoch in epochs))
    each_reads_all = all(set(epoch.samples) == reads.keys() for epoch in epochs)
    size = epochs[0].size
    repeated = sum(times > 1 for times in reads.values())
    missing = size - len(reads)
    tail = sum(epoch.last_batch for epoch in epochs)
    some_dropped = 0 < missing <= tail  # more are missing where somebody evaluates a part
    if each_reads_all or not (repeated or some_dropped):
        return Right()
    return Finding(
        f"{repeated} of {size} samples are read more than once, {missing} never, in evaluation {number}",
        "use a sampler that neither repeats nor drops samples, as common/eval_sampler.py has one",
        pitfall="padded_evaluation",
    )
