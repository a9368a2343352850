"""`Record.epochs`: where the ranks share out the numbers of samples, a number is the same sample on all of them.

What a rank reads in one epoch, another rank reads under the same number in the next one, and their contents are
compared. Samples that are drawn anew at each read prove nothing: so what a rank reads again itself is compared too.
"""

from common.doctor.answers import Answer, Finding, NotExamined, Right
from common.doctor.checks.alignment import across_ranks, are_numbered_alike
from common.doctor.checks.contents import SAME, Read, agreement_by_part, read_twice
from common.doctor.checks.samples import read_parts_of_one_order
from common.doctor.record import Record


def check_data_sets(records: list[Record]) -> Answer:
    """Right if the contents under one number are the same on two ranks; a Finding if they are others."""
    numbered = filter(are_numbered_alike, across_ranks(record.training_epochs for record in records))
    shared_out = list(filter(read_parts_of_one_order, numbered))
    of_one_data_set = [epochs for epochs in shared_out if epochs[0].data_set == shared_out[0][0].data_set]
    if len(of_one_data_set) < 2:
        return NotExamined("no two epochs dealt the numbers of the first data set out among the ranks")
    earlier, later = of_one_data_set[:2]
    by_same_rank: list[Read] = []
    by_another_rank: list[Read] = []
    for rank, epoch in enumerate(earlier):
        for later_rank, later_epoch in enumerate(later):
            reads = read_twice(epoch, later_epoch)
            if later_rank == rank:
                by_same_rank += reads
            else:
                by_another_rank += reads
    unchanged = [part for part, agreement in agreement_by_part(by_same_rank).items() if agreement >= SAME]
    agreement_of_ranks = agreement_by_part(by_another_rank)
    compared = [agreement_of_ranks[part] for part in unchanged if part in agreement_of_ranks]
    if not compared:
        return NotExamined("samples that are read twice are too few, are too alike, or change with each read")
    if max(compared) >= SAME:
        return Right()
    return Finding(
        f"the sampler deals out numbers, but {len(by_another_rank)} samples have other contents on another rank",
        "make the data alike on all ranks: draw them, and any random split, with the same seed",
    )
