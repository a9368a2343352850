"""`Record.epochs`: where the ranks share out the numbers of samples, a number is the same sample on all of them.

What a rank reads in one epoch, another rank reads under the same number in the next one, and their contents are
compared. Samples that are drawn anew at each read prove nothing: so what a rank reads again itself is compared too.
"""

from common.doctor.answers import Answer, Finding, NotExamined, Right
from common.doctor.checks.by_rank import MIN_SAMPLES, across_ranks
from common.doctor.checks.contents import Pairs, are_same_samples, read_twice
from common.doctor.checks.samples import read_parts_of_one_order
from common.doctor.record import Record


def check_data_sets(records: list[Record]) -> Answer:
    """Right if the contents under one number are the same on two ranks; a Finding if they are others."""
    shared_out = list(filter(read_parts_of_one_order, across_ranks(record.training_epochs for record in records)))
    if len(shared_out) < 2:
        return NotExamined("no two epochs dealt the numbers of samples out among the ranks")
    earlier, later = shared_out[:2]
    by_same_rank: Pairs = []
    by_another_rank: Pairs = []
    for rank, epoch in enumerate(earlier):
        for later_rank, later_epoch in enumerate(later):
            pairs = by_same_rank if later_rank == rank else by_another_rank
            pairs += read_twice(epoch, later_epoch)
    if len(by_another_rank) < MIN_SAMPLES:
        return NotExamined("too few samples were read again by another rank")
    if not are_same_samples(by_same_rank):
        return NotExamined("samples that one rank reads twice are too few, are too alike, or change with each read")
    if are_same_samples(by_another_rank):
        return Right()
    return Finding(
        f"the sampler deals out numbers, but {len(by_another_rank)} samples have other contents on another rank",
        "make the data alike on all ranks: draw them, and any random split, with the same seed",
    )
