"""`Record.epochs`: where the ranks share out the numbers of samples, a number is the same sample on all of them.

A rank reads a number in one epoch, another rank reads it in another epoch, and their contents are compared. Samples
that are drawn anew at each read prove nothing: so a rank's own later reads are compared with its first ones too.
"""

from common.doctor.answers import Answer, Finding, NotExamined, Right
from common.doctor.checks.by_rank import across_ranks
from common.doctor.checks.contents import are_same_samples, read_twice
from common.doctor.checks.samples import MIN_SAMPLES, read_parts_of_one_order
from common.doctor.record import Record


def check_data_sets(records: list[Record]) -> Answer:
    dealt_out = list(filter(read_parts_of_one_order, across_ranks(record.training_epochs for record in records)))
    if not dealt_out:
        return NotExamined("the samples are not dealt out among the ranks by their numbers")
    by_rank = []
    for of_rank in zip(*dealt_out, strict=True):
        by_rank.append([epoch for epoch in of_rank if epoch.data_set == of_rank[0].data_set])
    by_one_rank = [pair for earliest, *later in by_rank for pair in read_twice([earliest], later)]
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
