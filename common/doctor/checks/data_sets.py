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
    shared_out = list(filter(read_parts_of_one_order, across_ranks(record.training_epochs for record in records)))
    if not shared_out:
        return NotExamined("the samples are not dealt out among the ranks by their numbers")
    of_one_data_set = [epochs for epochs in shared_out if epochs[0].data_set == shared_out[0][0].data_set]
    epochs_by_rank = list(map(list, zip(*of_one_data_set, strict=True)))
    reread_by_same_rank = [pair for earliest, *later in epochs_by_rank for pair in read_twice([earliest], later)]
    first, *others = epochs_by_rank
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
