"""`Record.epochs`: each sample trains on one rank, and its number in the data set is the same sample on all ranks.

    each rank reads                                                           training samples    data sets
    a part of one order                                                       right               right
    a part of one order, of data of its own                                   right               found
    all samples in one order                                                  found               not examined
    all samples, and trains on one or more parts of each batch                not examined        not examined
    an order of its own                                                       found               not examined
    an order of its own, of data of its own                                   not examined        not examined
    samples that are drawn with replacement                                   not examined        not examined
    the same samples as the ranks that share its layers (tensor parallelism)  not examined        not examined
    all samples of a stream without numbers                                   found               not examined
    a part of such a stream                                                   not examined        not examined

Samples are compared by their numbers, and where that is not enough by their contents.
"""

from collections import Counter
from itertools import chain

from common.doctor.answers import Answer, Finding, NotExamined, Right, overall
from common.doctor.checks.by_rank import NO_NUMBERS, across_ranks, are_numbered_alike, training_epochs
from common.doctor.record import Content, Epoch, Record

MIN_SAMPLES = 16  # fewer samples may have something in common by chance
SAME = 0.9  # two ranks have read the same samples if a tensor agrees at least so often
Pairs = list[tuple[Content, Content]]  # two contents that were read under one number


def check_training_samples(records: list[Record]) -> Answer:
    if any(record.is_split for record in records):
        return NotExamined("on the mesh of the network, ranks may have the same samples")
    answers: list[Answer] = []
    for number, epochs in enumerate(across_ranks(map(training_epochs, records))):
        compare = _by_numbers if are_numbered_alike(epochs) else _by_contents
        answers.append(compare(number, epochs))
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
        return Right()  # a part of one order
    first, *others = epochs
    pairs = [pair for other in others for pair in read_twice([first], [other])]
    if pairs and not are_same_samples(pairs):  # an order of its own, of data of its own
        return NotExamined("a number has other contents on another rank: its own data set, or new with each read")
    if all(other.samples == first.samples for other in others):
        return _one_order(number, epochs)  # all samples in one order
    if shared < MIN_SAMPLES:  # as with a sampler that starts anew before its end
        return NotExamined(f"{shared} samples were read by several ranks, which may be the sampler's chance")
    return Finding(  # an order of its own
        f"without the last batch, {shared} of {len(readers)} samples were read by several ranks in epoch {number}",
        "deal one order out among the ranks, with one seed on all of them, as DistributedSampler does",
        pitfall="different_orders",
    )


def _by_contents(number: int, epochs: tuple[Epoch, ...]) -> Answer:
    of_ranks = [[content for batch in epoch.batches for content in batch.contents] for epoch in epochs]
    first, *others = of_ranks
    if len(set(first)) < MIN_SAMPLES or others != [first] * len(others):
        return NotExamined(NO_NUMBERS)
    return _one_order(number, epochs)


def _one_order(number: int, epochs: tuple[Epoch, ...]) -> Answer:
    """The answer where all ranks have read the same samples in the same order."""
    for epoch in epochs:
        # Two forwards of half a batch may be those of two networks with the same half, so they are not added up.
        whole = [batch for batch in epoch.batches if max(batch.forwards, default=0) >= batch.size]
        if len(whole) < len(epoch.batches) - 1:  # a script may read one batch ahead, or a last one in vain
            return NotExamined("each rank reads all samples, but the script may train it on a part of each batch")
    count = sum(batch.size for batch in epochs[0].batches)
    return Finding(
        f"each rank read the same {count} samples in the same order in epoch {number}",
        "let each rank read its own part: a DistributedSampler deals it out, and a stream chooses it by the rank",
    )


def check_data_sets(records: list[Record]) -> Answer:
    """The answer about the data sets of ranks that share out numbers: over several epochs they read the same ones."""
    if not isinstance(check_training_samples(records), Right):
        return NotExamined("the samples are not dealt out among the ranks by their numbers")
    by_rank = []
    by_one_rank: Pairs = []
    for record in records:
        trained = training_epochs(record)
        epochs = [epoch for epoch in trained if epoch.loader == trained[0].loader]
        by_rank.append(epochs)
        by_one_rank += read_twice(epochs[:1], epochs[1:])
    first, *others = by_rank
    by_two_ranks = [pair for epochs in others for pair in read_twice(first, epochs)]
    if min(len(by_one_rank), len(by_two_ranks)) < MIN_SAMPLES:
        return NotExamined("too few samples were read again, by the same rank and by another one")
    if not are_same_samples(by_one_rank):
        return NotExamined("the samples change with each read, or are too alike")
    if are_same_samples(by_two_ranks):
        return Right()
    return Finding(
        f"the sampler deals out numbers, but {len(by_two_ranks)} samples have other contents on another rank",
        "make the data alike on all ranks: draw them, and any random split, with the same seed",
    )


def read_twice(some: list[Epoch], others: list[Epoch]) -> Pairs:
    """The contents of the samples that were read both in some epochs and in others."""
    first = _contents_by_number(some)
    second = _contents_by_number(others)
    return [(first[number], second[number]) for number in first.keys() & second.keys()]


def _contents_by_number(epochs: list[Epoch]) -> dict[int, Content]:
    contents: dict[int, Content] = {}
    for epoch in epochs:
        for batch in epoch.batches:
            contents.update(zip(batch.samples, batch.contents, strict=False))
    return contents


def are_same_samples(pairs: Pairs) -> bool:
    """True if a tensor is equal in nearly all pairs, such as the label of an image that is augmented at each read.

    In these three pairs of an image and a label, ((1, 0), (2, 0)), ((3, 0), (4, 0)) and ((5, 7), (6, 7)), the label 7
    agrees. Pairs that begin with the most common one, 0, do not count: if 95 % have it, it agrees by chance.
    """
    columns = min(map(len, chain.from_iterable(pairs)))  # one for each tensor of a sample
    for column in range(columns):
        values = [(first[column], second[column]) for first, second in pairs]
        most_common, _ = Counter(first for first, _ in values).most_common(1)[0]
        agree = [first == second for first, second in values if first != most_common]
        if agree and sum(agree) >= SAME * len(agree):
            return True
    return False
