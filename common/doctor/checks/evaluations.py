"""Evaluation samples: each counts once. Each rank may read its own part, or all of them, but no padding."""

from collections import Counter
from itertools import chain

from common.doctor.checks.alignment import NO_INDICES, across_ranks, are_indexed_alike
from common.doctor.checks.epochs import evaluations, has_forwards, indices_of
from common.doctor.checks.samples import has_repeated
from common.doctor.record import Epoch, Record
from common.doctor.results import Finding, Passed, Result, Skipped, overall


def check_evaluation_samples(records: list[Record]) -> Result:
    if any(record.is_sharded for record in records):
        return Skipped("a sharded network needs equally many batches, and the script may drop what is repeated")
    of_ranks = [evaluations(record) for record in records]
    if len({len(epochs) for epochs in of_ranks}) > 1:
        return Skipped("the ranks made different numbers of evaluations")
    trained_on = [epoch.dataset for epoch in records[0].epochs if has_forwards(epoch)]
    results: list[Result] = []
    for number, epochs in enumerate(across_ranks(of_ranks)):
        # On training data the script may only renew BatchNorm's statistics.
        if epochs[0].dataset not in trained_on and all(epoch.complete for epoch in epochs):
            results.append(_judge_evaluation(number, epochs))
    return overall(results, "no evaluation was seen whole on all ranks, of data that are not trained on")


def _judge_evaluation(number: int, epochs: tuple[Epoch, ...]) -> Result:
    """The result about one evaluation, such as these of five samples on two ranks, in batches of one:

    0 2 4    1 3 1    not examined: rank 1 repeats a sample of its own, and may drop it
    0 2      1 3      not examined: 4 is left out, on purpose or not
    0 2 4    1 3      right: each is read once
    0 … 4    0 … 4    right: each rank evaluates all
    0 2 4    2 1 3    not examined: 2 is in no last batch, as padding would be
    0 2 4    1 3 0    found: 0 is read twice
    """
    if any(epoch.gathers for epoch in epochs):
        return Skipped("the script gathers from all ranks, and may drop what is repeated")
    if not are_indexed_alike(epochs):
        return Skipped(NO_INDICES)
    if any(epoch.available != epochs[0].available for epoch in epochs):
        return Skipped("each rank evaluates a Subset of its own")
    shares = [indices_of(epoch) for epoch in epochs]
    if any(map(has_repeated, shares)):
        return Skipped("a rank repeats samples of its own, and may drop them")
    readers = Counter(chain.from_iterable(shares))  # the number of ranks that have read a sample
    left_out = set(epochs[0].available).difference(readers)
    if left_out:
        return Skipped(f"{len(left_out)} samples were left out, on purpose or by mistake")
    repeated = {sample for sample, ranks in readers.items() if ranks > 1}
    each_evaluates_all = all(len(share) == len(readers) for share in shares)
    if not repeated or each_evaluates_all:
        return Passed()
    if not repeated.issubset(chain.from_iterable(epoch.batches[-1].indices for epoch in epochs)):
        return Skipped("several ranks read a sample that is in no last batch: it is not padding")
    text = f"{len(repeated)} of {len(readers)} samples are read more than once in evaluation {number}"
    advice = "use a sampler that repeats no samples, as common/eval_sampler.py has one"
    return Finding(text, advice, pitfall="padded_evaluation")
