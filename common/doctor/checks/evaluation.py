"""Evaluation: each sample counts once.

Six samples on two ranks:

    rank 0   rank 1   answer
    0 2 4    1 3 5    right
    0 … 5    0 … 5    right: each rank evaluates all
    0 2 4    1 3 0    found: 0 is read twice, and 5 never
    0 2      1 3      found, unless another evaluation reads 4 and 5

A sample that is read twice need not count twice. So nothing is examined where a script may drop it afterwards.
"""

from collections import Counter
from itertools import chain

from common.doctor.answers import Answer, Finding, NotExamined, Right, overall
from common.doctor.checks.by_rank import across_ranks, any_is_sharded, are_numbered_alike, evaluations
from common.doctor.record import Epoch, Record


def check_evaluation_samples(records: list[Record]) -> Answer:
    if any_is_sharded(records):
        return NotExamined("a sharded network needs equally many batches, and the script may drop what is repeated")
    if any("gather" in call.name for record in records for call in record.collectives):
        return NotExamined("the script gathers from all ranks, and may drop what is repeated")
    of_ranks = [evaluations(record) for record in records]
    if len(set(map(len, of_ranks))) > 1:
        return NotExamined("the ranks made different numbers of evaluations")
    samples_by_size: dict[int | None, set[int]] = {}  # those of all evaluations, by the length of the data set
    for epoch in chain.from_iterable(of_ranks):
        samples_by_size.setdefault(epoch.size, set()).update(epoch.samples)
    answers = []
    for number, epochs in enumerate(across_ranks(of_ranks)):
        if all(epoch.complete for epoch in epochs):
            answers.append(_evaluation(number, epochs, samples_by_size[epochs[0].size]))
    return overall(answers, "no evaluation was seen whole on all ranks")


def _evaluation(number: int, epochs: tuple[Epoch, ...], in_all_evaluations: set[int]) -> Answer:
    if not all(epoch.dealt_out_by_torch for epoch in epochs):
        return NotExamined("a library deals out the samples, and may drop what is repeated")
    if not are_numbered_alike(epochs):
        return NotExamined("the samples have no numbers, or the ranks have data sets of different sizes")
    samples = [epoch.samples for epoch in epochs]
    if any(len(share) > len(set(share)) for share in samples):
        return NotExamined("the sampler draws samples with replacement")
    if all(set(share) == set(samples[0]) for share in samples):
        return Right()
    reads = Counter(chain.from_iterable(samples))
    size = epochs[0].size
    repeated = sum(times > 1 for times in reads.values())
    missing = size - len(in_all_evaluations)
    last_batches = sum(len(epoch.batches[-1].samples) for epoch in epochs)
    # More are missing where the script evaluates a part of the data set.
    if repeated == 0 and not 0 < missing <= last_batches:
        return Right()
    return Finding(
        f"{repeated} of {size} samples are read more than once, {missing} never, in evaluation {number}",
        "use a sampler that neither repeats nor drops samples, as common/eval_sampler.py has one",
        pitfall="padded_evaluation",
    )
