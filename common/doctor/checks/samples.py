"""Training samples: each belongs to one rank, and its number in the data set means the same sample on all ranks.

Samples are compared by their numbers, and where that is not enough by fingerprints of their tensors.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import chain

from common.doctor.answers import Answer, Finding, NotExamined, Right, overall
from common.doctor.checks.by_rank import across_ranks, training_epochs, why_not_comparable
from common.doctor.record import Epoch, Record

MIN_SAMPLES = 16  # fewer samples may have something in common by chance
# Two ranks read the same samples if this part of their contents is equal: some labels agree by chance.
SAME_FRACTION = 0.9

Content = tuple[int, ...]  # a fingerprint of each tensor of a sample


def check_training_samples(records: list[Record]) -> Answer:
    answers: list[Answer] = []
    for number, epochs in enumerate(across_ranks(map(training_epochs, records))):
        reason = why_not_comparable(epochs)
        if all(_was_cut_by_the_script(epoch) for epoch in epochs):
            answers.append(NotExamined("the script itself cuts each rank's share out of a batch"))
        elif reason:
            answers.append(_answer_by_contents(number, epochs) or NotExamined(reason))
        else:
            answers.append(_answer_by_numbers(number, epochs))
    return overall(answers, "no pass over a DataLoader was seen in training on all ranks")


def _was_cut_by_the_script(epoch: Epoch) -> bool:
    """True if each forward was of a share of its batch, and of no micro-batch: they are no more than the batches."""
    return epoch.shares == epoch.forwards and epoch.forwards <= epoch.batches


def _answer_by_numbers(number: int, epochs: tuple[Epoch, ...]) -> Answer:
    # The last batch may be filled up with samples of the beginning.
    shares = [epoch.samples[: -epoch.last_batch] for epoch in epochs]
    if not all(shares):
        return NotExamined("fewer than two batches were read")
    if any(len(share) > len(set(share)) for share in shares):
        return NotExamined("the sampler draws samples with replacement")
    readers = Counter(chain.from_iterable(shares))  # the number of ranks that have read a sample
    shared = sum(ranks > 1 for ranks in readers.values())
    if not shared:
        return Right()
    contents = read_by_two([contents_by_number([epoch]) for epoch in epochs])
    if contents and not are_the_same(contents):
        return NotExamined("a number has other contents on another rank: its own data set, or new with each read")
    advice = "deal one order out among the ranks, with one seed on all of them, as DistributedSampler does"
    samples = epochs[0].samples
    if all(epoch.samples == samples for epoch in epochs):
        return Finding(f"each rank read the same {len(samples)} samples in the same order in epoch {number}", advice)
    if shared < MIN_SAMPLES:  # as with a sampler that starts anew before its end
        return NotExamined(f"{shared} samples were read by several ranks, which may be the sampler's chance")
    text = f"without the last batch, {shared} of {len(readers)} samples were read by several ranks in epoch {number}"
    return Finding(text, advice, pitfall="different_orders")


def _answer_by_contents(number: int, epochs: tuple[Epoch, ...]) -> Finding | None:
    """A finding if all ranks have read the same contents, as of an iterable data set."""
    contents = epochs[0].contents
    all_equal = all(epoch.contents == contents for epoch in epochs)
    if not all_equal or len(set(contents)) < MIN_SAMPLES:
        return None
    return Finding(
        f"each rank read {len(contents)} samples with the same contents in the same order in epoch {number}",
        "let each rank read a part of its own, which it chooses by its rank, or draw with a seed of its own",
    )


def check_data_sets(records: list[Record]) -> Answer:
    """The answer about the data sets of the ranks: a number must be the same sample on all of them.

    Over several epochs a sample is read by several ranks, whose contents can be compared. A sample that changes at each
    read, as with augmentation, also differs between two reads of one rank: then there is nothing to compare.
    """
    if not isinstance(check_training_samples(records), Right):
        return NotExamined("the samples are not dealt out among the ranks by their numbers")
    by_rank = []
    read_again = []
    for record in records:
        epochs = training_epochs(record)
        by_number = contents_by_number(epoch for epoch in epochs if epoch.loader == epochs[0].loader)
        by_rank.append(by_number)
        for contents in by_number.values():
            if len(contents) > 1:
                read_again.append((contents[0], contents[1]))
    by_two = read_by_two(by_rank)
    if min(len(read_again), len(by_two)) < MIN_SAMPLES:
        return NotExamined("too few samples were read again, by the same rank and by another one")
    if not are_the_same(read_again):
        return NotExamined("the samples change with each read")
    if are_the_same(by_two):
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


def read_by_two(by_rank: list[dict[int, list[Content]]]) -> list[tuple[Content, Content]]:
    """The two contents of each sample that rank 0 and another rank have read."""
    first, *others = by_rank
    pairs = []
    for other in others:
        for sample in first.keys() & other.keys():
            pairs.append((first[sample][0], other[sample][0]))
    return pairs


def are_the_same(pairs: list[tuple[Content, Content]]) -> bool:
    """True if the two contents of each pair are of one sample.

    Augmentation changes some tensors of a sample at each read, but not the label. So one equal tensor is enough.
    """
    tensors = min((len(one) for one, _ in pairs), default=0)
    for tensor in range(tensors):
        equal = sum(one[tensor] == other[tensor] for one, other in pairs)
        distinct = {one[tensor] for one, _ in pairs}
        if equal >= SAME_FRACTION * len(pairs) and len(distinct) > 1:
            return True
    return False
