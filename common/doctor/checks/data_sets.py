"""Data sets: the number of a sample means the same sample on all ranks.

    the ranks share out numbers of                        answer
    one data set                                          right
    data sets that each has drawn or split by itself      found
    data of which no tensor stays from read to read       not examined

Over several epochs a sample comes to several ranks, and its contents can be compared.
"""

from common.doctor.answers import Answer, Finding, NotExamined, Right
from common.doctor.checks.by_rank import training_epochs
from common.doctor.checks.contents import Pair, are_same_samples, contents_by_number, pairs_of_two_ranks
from common.doctor.checks.samples import MIN_SAMPLES, check_training_samples
from common.doctor.record import Record


def check_data_sets(records: list[Record]) -> Answer:
    if not isinstance(check_training_samples(records), Right):
        return NotExamined("the samples are not dealt out among the ranks by their numbers")
    by_rank = []
    read_again: list[Pair] = []  # the contents of samples that one rank has read twice
    for record in records:
        epochs = training_epochs(record)
        by_number = contents_by_number(epoch for epoch in epochs if epoch.loader == epochs[0].loader)
        by_rank.append(by_number)
        for contents in by_number.values():
            if len(contents) > 1:
                read_again.append(Pair(contents[0], contents[1]))
    by_two_ranks = pairs_of_two_ranks(by_rank)
    if min(len(read_again), len(by_two_ranks)) < MIN_SAMPLES:
        return NotExamined("too few samples were read again, by the same rank and by another one")
    if not are_same_samples(read_again):
        return NotExamined("the samples change with each read, or are too alike")
    if are_same_samples(by_two_ranks):
        return Right()
    return Finding(
        f"the sampler deals out numbers, but {len(by_two_ranks)} samples have other contents on another rank",
        "make the data alike on all ranks: draw them, and any random split, with the same seed",
    )
