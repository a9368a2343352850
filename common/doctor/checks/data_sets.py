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
    by_epoch = list(filter(read_parts_of_one_order, across_ranks(record.training_epochs for record in records)))
    if not by_epoch:
        return NotExamined("the samples are not dealt out among the ranks by their numbers")
    by_rank = []  # for each rank its epochs with the first data set
    for epochs_of_rank in zip(*by_epoch, strict=True):
        by_rank.append([epoch for epoch in epochs_of_rank if epoch.data_set == epochs_of_rank[0].data_set])
    reread_by_same_rank = [pair for earliest, *later in by_rank for pair in read_twice([earliest], later)]
    first, *others = by_rank
    reread_by_another_rank = [pair for epochs in others for pair in read_twice(first, epochs)]
    if min(len(reread_by_same_rank), len(reread_by_another_rank)) < MIN_SAMPLES:
        return NotExamined("too few samples were read again, by the same rank and by another one")
    if not are_same_samples(reread_by_same_rank):
        return NotExamined("the samples change with each read, or are too alike")
    if are_same_samples(reread_by_another_rank):
        return Right()
    return Finding(
        f"the sampler deals out numbers, but {len(reread_by_another_rank)} samples have other contents on another rank",
        "make the data alike on all ranks: draw them, and any random split, with the same seed",
    )
