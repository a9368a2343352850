"""`Record.epochs`: in an evaluation each sample counts once."""

from collections import Counter
from itertools import chain

from common.doctor.answers import Answer, Finding, NotExamined, Right, overall
from common.doctor.checks.by_rank import NO_NUMBERS, across_ranks, are_numbered_alike, has_repeated
from common.doctor.record import Epoch, Record


def check_evaluation_samples(records: list[Record]) -> Answer:
    if any(record.is_sharded for record in records):
        return NotExamined("a sharded network needs equally many batches, and the script may drop what is repeated")
    of_ranks = [record.evaluations for record in records]
    if len({len(epochs) for epochs in of_ranks}) > 1:
        return NotExamined("the ranks made different numbers of evaluations")
    trained_on = [epoch.data_set for epoch in records[0].training_epochs]
    answers: list[Answer] = []
    for number, epochs in enumerate(across_ranks(of_ranks)):
        if epochs[0].data_set in trained_on:
            answers.append(NotExamined("they are trained on too: the script may only renew BatchNorm's statistics"))
        elif any(epoch.gathers for epoch in epochs):
            answers.append(NotExamined("the script gathers from all ranks, and may drop what is repeated"))
        elif all(epoch.complete for epoch in epochs):
            answers.append(_evaluation(number, epochs, of_ranks))
    return overall(answers, "no evaluation was seen whole on all ranks")


def _evaluation(number: int, epochs: tuple[Epoch, ...], of_ranks: list[list[Epoch]]) -> Answer:
    """The answer about one evaluation, such as these of six samples on two ranks, in batches of one:

    0 2 4 0  1 3 5 1  not examined: the script may drop the padding, or draw the samples with replacement
    0 2 4    2 5 1    not examined: 2 is in no last batch, as padding would be, so each rank may draw its own samples
    0 2 4    1 3 5    right
    0 … 5    0 … 5    right: each rank evaluates all
    0 2      1 3      right if another evaluation, of this data set, reads of 4 and 5 only: the rest is left to it
    0        1        right: a loader drops less than a batch on each rank, so a part is evaluated on purpose
    0 2 4    1 3 0    found: 0 is read twice, and 5 never
    0 … 3    0 … 3    found: the last batches were dropped
    """
    if not are_numbered_alike(epochs):
        return NotExamined(NO_NUMBERS)
    if any(epoch.numbers != epochs[0].numbers for epoch in epochs):
        return NotExamined("each rank evaluates a Subset of its own, which may leave samples out on purpose")
    shares = [epoch.samples for epoch in epochs]
    if any(map(has_repeated, shares)):  # 0 2 4 0, 1 3 5 1
        return NotExamined("a rank repeats samples of its own: they are padding, or drawn with replacement")
    readers = Counter(chain.from_iterable(shares))  # the number of ranks that have read a sample
    each_evaluates_all = all(set(share) == set(shares[0]) for share in shares)
    read_by_several = {sample for sample, ranks in readers.items() if ranks > 1}
    repeated = set() if each_evaluates_all else read_by_several
    last_batches = list(chain.from_iterable(epoch.batches[-1].samples for epoch in epochs))
    if not repeated.issubset(last_batches):  # 0 2 4, 2 5 1
        return NotExamined("several ranks read a sample that is in no last batch: it is not padding")
    dropped = set(epochs[0].numbers).difference(readers)
    others = [epoch for epoch in chain.from_iterable(of_ranks) if epoch.data_set_length == epochs[0].data_set_length]
    another_reads_them = any(other.samples and dropped.issuperset(other.samples) for other in others)
    if another_reads_them or len(dropped) > len(last_batches):  # 0 2, 1 3 and 0, 1
        dropped.clear()
    if not repeated and not dropped:  # 0 2 4, 1 3 5 and 0 … 5, 0 … 5
        return Right()
    return Finding(  # 0 2 4, 1 3 0 and 0 … 3, 0 … 3
        f"{len(repeated)} of {len(readers) + len(dropped)} samples are read more than once, {len(dropped)} never, "
        f"in evaluation {number}",
        "use a sampler that neither repeats nor drops samples, as common/eval_sampler.py has one",
        pitfall="padded_evaluation",
    )
