"""Contents of samples: two ranks have read a number, and the question is whether they have read the same sample."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from common.doctor.record import Content, Epoch

SAME = 0.9  # two ranks have read the same samples if a tensor agrees at least so often


class Pair(NamedTuple):
    """Two contents that were read under one number."""

    first: Content
    second: Content


def contents_by_number(epochs: Iterable[Epoch]) -> dict[int, list[Content]]:
    """The contents that one rank has read under each number."""
    found = defaultdict(list)
    for epoch in epochs:
        for batch in epoch.batches:
            for sample, content in zip(batch.samples, batch.contents, strict=False):
                found[sample].append(content)
    return found


def pairs_of_two_ranks(by_rank: list[dict[int, list[Content]]]) -> list[Pair]:
    """The contents of each sample that rank 0 and another rank have read."""
    first, *others = by_rank
    pairs = []
    for other in others:
        for sample in first.keys() & other.keys():
            pairs.append(Pair(first[sample][0], other[sample][0]))
    return pairs


def are_same_samples(pairs: list[Pair]) -> bool:
    """True if nearly all pairs agree in one of their tensors.

    Augmentation changes the image of a sample at each read, but not its label. These are the same samples, as image
    and label:

        (81, 7) (35, 7)    (62, 0) (17, 0)    (90, 3) (55, 3)

    Pairs with the most common value of a tensor do not count. It may be the label of 95 % of the samples, or the mask
    of all, and would agree by chance.
    """
    tensors = min(len(content) for pair in pairs for content in pair)
    for tensor in range(tensors):
        values = Counter(pair.first[tensor] for pair in pairs)
        most_common, _ = values.most_common(1)[0]
        agree = [pair.first[tensor] == pair.second[tensor] for pair in pairs if pair.first[tensor] != most_common]
        if agree and sum(agree) >= SAME * len(agree):
            return True
    return False
