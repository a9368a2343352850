"""`Batch.contents`: whether two ranks, or one rank in two epochs, have read the same samples under the same numbers."""

from collections import Counter
from itertools import chain

from common.doctor.checks.by_rank import MIN_SAMPLES
from common.doctor.record import Content, Epoch

SAME = 0.9  # they have if a tensor agrees at least so often
Pairs = list[tuple[Content, Content]]  # two contents that were read under one number


def read_twice(one: Epoch, other: Epoch) -> Pairs:
    """The contents of the samples that were read in both epochs."""
    first = _contents_by_number(one)
    second = _contents_by_number(other)
    return [(first[number], second[number]) for number in first.keys() & second.keys()]


def _contents_by_number(epoch: Epoch) -> dict[int, Content]:
    contents: dict[int, Content] = {}
    for batch in epoch.batches:
        contents.update(zip(batch.samples, batch.contents, strict=False))
    return contents


def are_same_samples(pairs: Pairs) -> bool:
    """True if a tensor is equal in nearly all of enough pairs, such as the label of an image that is augmented.

    Pairs with its most common value do not count: a label that 95 % of the samples have agrees by chance. An index that
    the data set returns agrees always.
    """
    if len(pairs) < MIN_SAMPLES:
        return False
    columns = min(map(len, chain.from_iterable(pairs)))  # one for each tensor of a sample
    for column in range(columns):
        values = [(first[column], second[column]) for first, second in pairs]
        most_common, _ = Counter(first for first, _ in values).most_common(1)[0]
        agree = [first == second for first, second in values if first != most_common]
        if agree and sum(agree) >= SAME * len(agree):
            return True
    return False
