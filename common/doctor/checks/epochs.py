"""`Record.epochs`: each epoch of a training has an order of its own, and in an evaluation each sample counts once."""

from collections import Counter
from itertools import chain, pairwise

from common.doctor.answers import Answer, Finding, NotExamined, Right, overall
from common.doctor.checks.by_rank import NO_NUMBERS, across_ranks, are_numbered_alike, evaluations, training_epochs
from common.doctor.record import Epoch, Record

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


def check_evaluation_samples(records: list[Record]) -> Answer:
    """The answer about the samples of evaluations, such as these of six samples on two ranks, in batches of one:

    0 2 4    1 3 5    right
    0 … 5    0 … 5    right: each rank evaluates all
    0 2 4    1 3 0    found: 0 is read twice, and 5 never
    0 2      1 3      found: the last batches were dropped, unless another evaluation reads 4 and 5, and nothing else
    0        1        right: more are missing than the last batches have, so a part is evaluated on purpose
    """
    if any(record.is_sharded for record in records):
        return NotExamined("a sharded network needs equally many batches, and the script may drop what is repeated")
    of_ranks = [evaluations(record) for record in records]
    if len({len(epochs) for epochs in of_ranks}) > 1:
        return NotExamined("the ranks made different numbers of evaluations")
    answers: list[Answer] = []
    for number, epochs in enumerate(across_ranks(of_ranks)):
        if gathers(records[0], epochs[0]):  # and so do the other ranks
            answers.append(NotExamined("the script gathers from all ranks, and may drop what is repeated"))
        elif all(epoch.complete for epoch in epochs):
            answers.append(_evaluation(number, epochs, of_ranks))
    return overall(answers, "no evaluation was seen whole on all ranks")


def gathers(record: Record, evaluation: Epoch) -> bool:
    """True if the rank gathers during an evaluation, or first of all after its last batch."""
    first = evaluation.batches[0].collectives
    last = evaluation.batches[-1].collectives
    return any("gather" in call.name for call in record.collectives[first : last + 1])


def _evaluation(number: int, epochs: tuple[Epoch, ...], of_ranks: list[list[Epoch]]) -> Answer:
    if not are_numbered_alike(epochs):
        return NotExamined(NO_NUMBERS)
    samples = [epoch.samples for epoch in epochs]
    if any(len(share) > len(set(share)) for share in samples):
        return NotExamined("the sampler draws samples with replacement")
    if all(set(share) == set(samples[0]) for share in samples):
        return Right()
    size = epochs[0].size
    reads = Counter(chain.from_iterable(samples))
    repeated = sum(times > 1 for times in reads.values())
    missing = set(range(size)) - reads.keys()
    dropped = set(missing)
    for other in chain.from_iterable(of_ranks):
        if other.size == size and missing.issuperset(other.samples):
            dropped.difference_update(other.samples)
    last_batches = sum(epoch.batches[-1].size for epoch in epochs)
    if not repeated and not 0 < len(dropped) <= last_batches:
        return Right()
    return Finding(
        f"{repeated} of {size} samples are read more than once, {len(missing)} never, in evaluation {number}",
        "use a sampler that neither repeats nor drops samples, as common/eval_sampler.py has one",
        pitfall="padded_evaluation",
    )
