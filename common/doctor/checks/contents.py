"""`Batch.contents`: whether two ranks, or one rank in two epochs, have read the same samples under the same numbers."""

from collections import Counter
from itertools import chain, pairwise

from common.doctor.checks.sample_numbers import MIN_SAMPLES
from common.doctor.record import Content, Epoch

SAME = 0.9  # samples are the same if one of their tensors, as the label of an augmented image, agrees so often
Reads = list[tuple[Content, Content, Content]]  # those of a number in one epoch, in another, and of the next number


def read_twice(one: Epoch, other: Epoch) -> Reads:
    """The contents of the samples that were read in both epochs, and of the next number that was read in the first."""
    first = _contents_by_number(one)
    second = _contents_by_number(other)
    numbers = [(number, following) for number, following in pairwise(sorted(first)) if number in second]
    return [(first[number], second[number], first[following]) for number, following in numbers]


def _contents_by_number(epoch: Epoch) -> dict[int, Content]:
    contents: dict[int, Content] = {}
    for batch in epoch.batches:
        contents.update(zip(batch.samples, batch.contents, strict=False))
    return contents


def agreements(reads: Reads) -> dict[int, float]:
    """For each tensor of a sample, by its place: how often the two reads agree, from 0 to 1, if enough samples count.

    A sample does not count if its reads may agree by chance: in a label that 95 % of the samples have, or that the next
    number has too. So each rank may have every other file of a folder that is sorted by label.
    """
    parts: dict[int, float] = {}
    columns = min(map(len, chain.from_iterable(reads)), default=0)  # one for each tensor of a sample
    for column in range(columns):
        values = [(first[column], second[column], following[column]) for first, second, following in reads]
        most_common, _ = Counter(first for first, _, _ in values).most_common(1)[0]
        agree = [first == second for first, second, following in values if first not in (most_common, following)]
        if len(agree) >= MIN_SAMPLES:
            parts[column] = sum(agree) / len(agree)
    return parts
