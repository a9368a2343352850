"""Training samples: each belongs to one rank, and its number in the data set means the same sample on all ranks.

       each rank reads                              training samples    data sets
    1  its half of one order                        right               right
    2  its half of one order, of data of its own    right               found
    3  all samples in one order                     found               not examined
    4  an order of its own                          found               not examined
    5  an order of its own, of data of its own      not examined        not examined
    6  samples that are drawn with replacement      not examined        not examined
    7  whole batches, and trains on its share       not examined        not examined
    8  all samples of a stream without numbers      found by contents   not examined
    9  a part of such a stream                      not examined        not examined

Samples are compared by their numbers, and where that is not enough by their contents, fingerprints of their tensors.
Comments in the code name the rows of this table.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import chain

from common.doctor.answers import Answer, Finding, NotExamined, Right, overall
from common.doctor.checks.by_rank import across_ranks, training_epochs, why_not_comparable
from common.doctor.record import Epoch, Record

MIN_SAMPLES = 16  # fewer samples may have something in common by chance
SAME = 0.9  # two ranks have read the same samples if a tensor agrees at least so often

Content = tuple[int, ...]  # a fingerprint of each tensor of a sample
Pairs = list[tuple[Content, Content]]  # pairs of contents that were read under one number


def check_training_samples(records: list[Record]) -> Answer:
    answers: list[Answer] = []
    for number, epochs in enumerate(across_ranks(map(training_epochs, records))):
        reason = why_not_comparable(epochs)
        if reason:
            answers.append(_answer_by_contents(number, epochs, reason))
        else:
            answers.append(_answer_by_numbers(number, epochs))
    return overall(answers, "no pass over a DataLoader was seen in training on all ranks")


def _answer_by_numbers(number: int, epochs: tuple[Epoch, ...]) -> Answer:
    # The last batch may be filled up with samples of the beginning.
    shares = [epoch.samples[: -epoch.last_batch] for epoch in epochs]
    if not all(shares):
        return NotExamined("fewer than two batches were read")
    if any(len(share) > len(set(share)) for share in shares):  # row 6
        return NotExamined("the sampler draws samples with replacement")
    readers = Counter(chain.from_iterable(shares))  # the number of ranks that have read a sample
    shared = sum(ranks > 1 for ranks in readers.values())
    if not shared:  # rows 1 and 2
        return Right()
    pairs = pairs_of_two_ranks([contents_by_number([epoch]) for epoch in epochs])
    if pairs and not have_a_common_tensor(pairs):  # row 5
        return NotExamined("a number has other contents on another rank: its own data set, or new with each read")
    advice = "deal one order out among the ranks, with one seed on all of them, as DistributedSampler does"
    samples = epochs[0].samples
    if all(epoch.samples == samples for epoch in epochs):
        trained = sum(epoch.samples_in_forwards for epoch in epochs)
        # A script that stops in the middle of the data may have read a last batch in vain.
        if len(samples) - epochs[0].last_batch <= trained <= len(samples):  # row 7
            return NotExamined("the script itself cuts each rank's share out of a batch")
        text = f"each rank read the same {len(samples)} samples in the same order in epoch {number}"
        return Finding(text, advice)  # row 3
    if shared < MIN_SAMPLES:  # as with a sampler that starts anew before its end
        return NotExamined(f"{shared} samples were read by several ranks, which may be the sampler's chance")
    text = f"without the last batch, {shared} of {len(readers)} samples were read by several ranks in epoch {number}"
    return Finding(text, advice, pitfall="different_orders")  # row 4


def _answer_by_contents(number: int, epochs: tuple[Epoch, ...], why_not_by_numbers: str) -> Answer:
    """The answer about samples without numbers, in rows 8 and 9."""
    contents = epochs[0].contents
    all_equal = all(epoch.contents == contents for epoch in epochs)
    if not all_equal or len(set(contents)) < MIN_SAMPLES:
        return NotExamined(why_not_by_numbers)
    return Finding(
        f"each rank read {len(contents)} samples with the same contents in the same order in epoch {number}",
        "let each rank read a part of its own, which it chooses by its rank, or draw with a seed of its own",
    )


def check_data_sets(records: list[Record]) -> Answer:
    """The answer about the data sets of the ranks, whose samples are dealt out by their numbers.

    Over several epochs a sample comes to several ranks, and its contents can be compared. Augmentation changes some
    tensors of a sample at each read, but not the label. So one tensor that stays is enough, and nothing is said where
    none stays when one rank reads again.
    """
    if not isinstance(check_training_samples(records), Right):
        return NotExamined("the samples are not dealt out among the ranks by their numbers")
    by_rank = []
    read_again: Pairs = []
    for record in records:
        epochs = training_epochs(record)
        by_number = contents_by_number(epoch for epoch in epochs if epoch.loader == epochs[0].loader)
        by_rank.append(by_number)
        twice = [contents for contents in by_number.values() if len(contents) > 1]
        read_again += [(contents[0], contents[1]) for contents in twice]
    by_two = pairs_of_two_ranks(by_rank)
    if min(len(read_again), len(by_two)) < MIN_SAMPLES:
        return NotExamined("too few samples were read again, by the same rank and by another one")
    if not have_a_common_tensor(read_again):
        return NotExamined("the samples change with each read, or are too alike")
    if have_a_common_tensor(by_two):
        return Right()
    return Finding(
        f"the sampler deals out numbers, but {len(by_two)} samples have other contents on another rank",
        "make the data alike on all ranks: draw them, and any random split, with the same seed",
    )


def contents_by_number(epochs: Iterable[Epoch]) -> dict[int, list[Content]]:
    """The contents that one rank has read under each number."""
    found = defaultdict(list)
    for epoch in epochs:
        for sample, content in zip(epoch.samples or [], epoch.contents, strict=False):
            found[sample].append(content)
    return found


def pairs_of_two_ranks(by_rank: list[dict[int, list[Content]]]) -> Pairs:
    """The two contents of each sample that rank 0 and another rank have read."""
    first, *others = by_rank
    pairs = []
    for other in others:
        for sample in first.keys() & other.keys():
            pairs.append((first[sample][0], other[sample][0]))
    return pairs


def have_a_common_tensor(pairs: Pairs) -> bool:
    """True if a tensor is equal in nearly all pairs that do not begin with its most common value.

    That value proves nothing: it may be the label of 95 % of the samples, or the mask of all.
    """
    tensors = min(map(len, chain.from_iterable(pairs)))
    for tensor in range(tensors):
        values = [(first[tensor], second[tensor]) for first, second in pairs]
        most_common, _ = Counter(first for first, _ in values).most_common(1)[0]
        equal = [first == second for first, second in values if first != most_common]
        if equal and sum(equal) >= SAME * len(equal):
            return True
    return False
