"""`Batch.contents`: whether two ranks, or one rank in two epochs, have read the same samples under the same numbers."""

from collections import Counter
from itertools import chain, pairwise
from typing import NamedTuple

from common.doctor.record import Content, Epoch

MIN_SAMPLES = 16  # fewer samples may have something in common, or come in one order, by chance
SAME = 0.9  # samples are the same if one of their tensors, as the label of an augmented image, agrees so often


class Read(NamedTuple):
    """The content of a sample in two epochs. A part of it, as its label, is compared where chance cannot make it agree:

    here  there  after
    cat   cat    cat    not compared: a rank may have every other file of a folder that is sorted by label
    cat   cat    dog    not compared, if most samples are cats; else they agree
    cat   dog    dog    they differ
    """

    here: Content
    there: Content  # in the other epoch
    after: Content  # here, of the next number that was read


def read_twice(one: Epoch, other: Epoch) -> list[Read]:
    first = _contents_by_number(one)
    second = _contents_by_number(other)
    numbers = [(number, following) for number, following in pairwise(sorted(first)) if number in second]
    return [Read(first[number], second[number], first[following]) for number, following in numbers]


def _contents_by_number(epoch: Epoch) -> dict[int, Content]:
    contents: dict[int, Content] = {}
    for batch in epoch.batches:
        contents.update(zip(batch.samples, batch.contents, strict=False))
    return contents


def agreement_by_part(reads: list[Read]) -> dict[int, float]:
    """For each part (a tensor), by its place: how often it agrees in two reads, from 0 to 1, if enough are compared."""
    agreement: dict[int, float] = {}
    parts = min(map(len, chain.from_iterable(reads)), default=0)
    for part in range(parts):
        most_common, _ = Counter(read.here[part] for read in reads).most_common(1)[0]
        compared = [read for read in reads if read.here[part] not in (most_common, read.after[part])]
        if len(compared) >= MIN_SAMPLES:
            agreement[part] = sum(read.here[part] == read.there[part] for read in compared) / len(compared)
    return agreement
