"""Training samples: each belongs to one rank.

    each rank reads                                           answer
    a part of one order                                       right
    all samples in one order                                  found
    all samples in one order, and trains on a part of each    not examined
    an order of its own                                       found
    an order of its own, of data of its own                   not examined
    samples that are drawn with replacement                   not examined
    the samples of its row on a mesh                          not examined
    a stream without numbers, whole                           found
    a part of such a stream                                   not examined

Samples are compared by their numbers in the data set, and those of a stream by their contents.
"""

from collections import Counter
from itertools import chain

from common.doctor.answers import Answer, Finding, NotExamined, Right, overall
from common.doctor.checks.by_rank import across_ranks, any_is_split, are_numbered_alike, training_epochs
from common.doctor.checks.contents import are_same_samples, contents_by_number, pairs_of_two_ranks
from common.doctor.record import Epoch, Record

MIN_SAMPLES = 16  # fewer samples may have something in common by chance


def check_training_samples(records: list[Record]) -> Answer:
    if any_is_split(records):
        return NotExamined("ranks that compute parts of one network have the same samples")
    answers: list[Answer] = []
    for number, epochs in enumerate(across_ranks(map(training_epochs, records))):
        if are_numbered_alike(epochs):
            answers.append(_by_numbers(number, epochs))
        else:
            answers.append(_by_contents(number, epochs))
    return overall(answers, "no pass over a DataLoader was seen in training on all ranks")


def _by_numbers(number: int, epochs: tuple[Epoch, ...]) -> Answer:
    # The last batch may be filled up with samples of the beginning.
    shares = [epoch.samples[: -len(epoch.batches[-1].samples)] for epoch in epochs]
    if not all(shares):
        return NotExamined("fewer than two batches were read")
    if any(len(share) > len(set(share)) for share in shares):
        return NotExamined("the sampler draws samples with replacement")
    readers = Counter(chain.from_iterable(shares))  # the number of ranks that have read a sample
    shared = sum(ranks > 1 for ranks in readers.values())
    if not shared:
        return Right()
    pairs = pairs_of_two_ranks([contents_by_number([epoch]) for epoch in epochs])
    if pairs and not are_same_samples(pairs):
        return NotExamined("a number has other contents on another rank: its own data set, or new with each read")
    if all(epoch.samples == epochs[0].samples for epoch in epochs):
        return _one_order(number, epochs, len(epochs[0].samples))
    if shared < MIN_SAMPLES:  # as with a sampler that starts anew before its end
        return NotExamined(f"{shared} samples were read by several ranks, which may be the sampler's chance")
    return Finding(
        f"without the last batch, {shared} of {len(readers)} samples were read by several ranks in epoch {number}",
        "deal one order out among the ranks, with one seed on all of them, as DistributedSampler does",
        pitfall="different_orders",
    )


def _by_contents(number: int, epochs: tuple[Epoch, ...]) -> Answer:
    of_ranks = [list(chain.from_iterable(batch.contents for batch in epoch.batches)) for epoch in epochs]
    contents = of_ranks[0]
    if len(set(contents)) < MIN_SAMPLES or any(other != contents for other in of_ranks):
        return NotExamined("the samples have no numbers, or the ranks have data sets of different sizes")
    return _one_order(number, epochs, len(contents))


def _one_order(number: int, epochs: tuple[Epoch, ...], count: int) -> Answer:
    """The answer where all ranks have read the same samples in the same order."""
    if not all(map(_is_trained_whole, epochs)):
        return NotExamined("each rank reads all samples, but the script may train it on a part of each batch")
    return Finding(
        f"each rank read the same {count} samples in the same order in epoch {number}",
        "let each rank read a part of its own: deal them out by a DistributedSampler, or let a stream choose its part "
        "by the rank",
    )


def _is_trained_whole(epoch: Epoch) -> bool:
    """True if each batch went whole into a forward, but for one: a script may read a last batch in vain, or read ahead.

    It is not where a rank trains on every other batch, on a part of each, or where the samples of a forward could not
    be counted.
    """
    whole = 0
    for batch in epoch.batches:
        size = len(batch.samples or batch.contents)
        whole += max(batch.forwards, default=0) >= size
    return whole >= len(epoch.batches) - 1
