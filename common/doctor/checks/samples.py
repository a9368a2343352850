"""Samples: each trains on one rank, in another order in each epoch, and each is evaluated once."""

import math
from collections import Counter
from itertools import chain, pairwise

from common.doctor.checks.alignment import NO_INDICES, across_ranks, are_indexed_alike
from common.doctor.checks.contents import MIN_SAMPLES, SAME, TwoReads, agreement_by_part, reads_in_both
from common.doctor.checks.epochs import evaluations, has_forwards, indices_of, size_of, training_epochs
from common.doctor.record import Epoch, Record
from common.doctor.results import Finding, Passed, Result, Skipped, overall


def check_training_samples(records: list[Record]) -> Result:
    """Passed if no sample is read twice in an epoch; a Finding if each rank reads all of them."""
    if any(record.is_tensor_parallel for record in records):
        return Skipped("on the mesh of the network, ranks may have the same samples")
    of_ranks = across_ranks(map(training_epochs, records))
    results = [_judge_epoch(number, epochs) for number, epochs in enumerate(of_ranks)]
    return overall(results, "no epoch was seen on all ranks' main threads with an optimizer step between two batches")


def _judge_epoch(number: int, epochs: tuple[Epoch, ...]) -> Result:
    """The result about one epoch, such as these of the samples 0 to 3. The first that applies decides:

    a stream           that of `_judge_stream`, as its samples have no indices
    0 2      1 3       right: parts of one order
    0 2      2 1       found, if they are half of a Subset 0 1 2 3 on rank 0, and 1 2 4 5 on rank 1
    0 2 3    1 3 0     not examined: rank 0 leaves out 1, so the repeats may be meant
    0 2 1 3  3 1 0 2   not examined, if the contents of an index differ: each rank may have data of its own
    0 2 1 3  0 2 1 3   that of `_judge_one_order`
    0 2 1 3  3 1 0 2   found: each rank reads each once, in an order of its own
    """
    first, *others = epochs
    if not are_indexed_alike(epochs):
        return _judge_stream(number, epochs)
    if read_parts_of_one_order(epochs):
        return Passed()
    if any(read_shares_of_two_subsets(first, other, len(epochs)) for other in others):
        text = f"in epoch {number} each rank read its share of a Subset of its own, and the Subsets overlap"
        return Finding(text, "make the random split with the same seed on all ranks")
    for epoch in epochs:
        left_out = set(first.available).difference(indices_of(epoch))
        is_tail = len(left_out) < size_of(epoch.batches[0])
        if has_repeated(indices_of(epoch)) or not is_tail:
            return Skipped("few were read, or some twice, and not each once on each rank, as where Subsets differ")
    agreement = agreement_by_part([read for other in others for read in reads_in_both(first, other)])
    if max(agreement.values(), default=0.0) < SAME:
        return Skipped("no contents show that an index is the same sample on each rank")
    if all(indices_of(epoch) == indices_of(first) for epoch in epochs):
        return _judge_one_order(number, epochs)
    text = f"each rank read all {len(first.available)} samples in epoch {number}, in an order of its own"
    advice = "deal one order out among the ranks, with one seed on all of them, as DistributedSampler does"
    return Finding(text, advice, pitfall="different_orders")


def read_parts_of_one_order(epochs: tuple[Epoch, ...]) -> bool:
    """True if half of the indices were read, and none twice but in the last batches, which a sampler may fill up."""
    shares = [indices_of(epoch)[: -len(epoch.batches[-1].indices)] for epoch in epochs]
    count = sum(len(indices_of(epoch)) for epoch in epochs)
    are_enough = 2 * count >= len(epochs[0].available)  # of fewer, none may be read twice by chance
    return are_enough and all(shares) and not has_repeated(list(chain.from_iterable(shares)))


def has_repeated(samples: list[int]) -> bool:
    return len(set(samples)) < len(samples)


def read_shares_of_two_subsets(first: Epoch, other: Epoch, ranks: int) -> bool:
    in_both = set(first.available).intersection(other.available)
    is_share = len(indices_of(other)) == math.ceil(len(other.available) / ranks)
    return is_share and 0 < len(in_both) < len(first.available)


def _judge_stream(number: int, epochs: tuple[Epoch, ...]) -> Result:
    of_ranks = [[content for batch in epoch.batches for content in batch.contents] for epoch in epochs]
    first, *others = of_ranks
    if len(set(first)) < MIN_SAMPLES or others != [first] * len(others):  # a part of a stream
        return Skipped(NO_INDICES)
    return _judge_one_order(number, epochs)


def _judge_one_order(number: int, epochs: tuple[Epoch, ...]) -> Result:
    for epoch in epochs:
        # A batch is trained whole if a forward had all samples. Two of 2 of 4 may be two networks with one half.
        not_whole = [batch for batch in epoch.batches if max(batch.forwards, default=0) < size_of(batch)]
        if len(not_whole) > 1:  # one may have no forward: see `Batch`
            return Skipped("each rank reads all samples, but the script may train it on a part of them")
    count = sum(map(size_of, epochs[0].batches))
    text = f"each rank read the same {count} samples in the same order in epoch {number}"
    advice = "let each rank read its own part, as by DistributedSampler; ranks that share a model may read the same"
    return Finding(text, advice)


def check_datasets(records: list[Record]) -> Result:
    """Passed if an index is the same sample on two ranks; a Finding if it has other contents on another rank.

    What a rank reads in one epoch, another rank reads under the same index in the next one, and their contents are
    compared. Samples that are drawn anew at each read prove nothing: so what a rank reads again itself is compared too.
    """
    indexed = filter(are_indexed_alike, across_ranks(map(training_epochs, records)))
    shared_out = list(filter(read_parts_of_one_order, indexed))
    of_one_dataset = [epochs for epochs in shared_out if epochs[0].dataset == shared_out[0][0].dataset]
    if len(of_one_dataset) < 2:
        return Skipped("no two epochs dealt the indices of the first dataset out among the ranks")
    earlier, later = of_one_dataset[:2]
    by_same_rank: list[TwoReads] = []
    by_another_rank: list[TwoReads] = []
    for rank, epoch in enumerate(earlier):
        for later_rank, later_epoch in enumerate(later):
            reads = by_same_rank if rank == later_rank else by_another_rank
            reads += reads_in_both(epoch, later_epoch)
    unchanged = [part for part, agreement in agreement_by_part(by_same_rank).items() if agreement >= SAME]
    agreement_of_ranks = agreement_by_part(by_another_rank)
    compared = [agreement_of_ranks[part] for part in unchanged if part in agreement_of_ranks]
    if not compared:
        return Skipped("samples that are read twice are too few, are too alike, or change with each read")
    if max(compared) >= SAME:
        return Passed()
    text = f"the sampler deals out indices, but {len(by_another_rank)} samples have other contents on another rank"
    return Finding(text, "make the data alike on all ranks: draw them with the same seed")


def check_orders(records: list[Record]) -> Result:
    """Passed if each epoch has another order than the one before; a Finding if it has the same shuffled order."""
    results: list[Result] = []
    for record in records:
        epochs = [epoch for epoch in training_epochs(record) if len(indices_of(epoch)) >= MIN_SAMPLES]
        for dataset in dict.fromkeys(epoch.dataset for epoch in epochs):  # they may be read in turn
            of_one = [epoch for epoch in epochs if epoch.dataset == dataset]
            results += [_judge_order(record.rank, earlier, later) for earlier, later in pairwise(of_one)]
    return overall(results, "no two epochs had one dataset")


def _judge_order(rank: int, earlier: Epoch, later: Epoch) -> Result:
    length = min(len(indices_of(earlier)), len(indices_of(later)))
    order = indices_of(earlier)[:length]
    places = {index: place for place, index in enumerate(earlier.available)}  # random_split shuffles the indices
    # Without a length no indices are known, and a sampler may go beyond it: then an index is its own place.
    read = [places.get(index, index) for index in order]
    descents = sum(place > following for place, following in pairwise(read))
    if descents <= 1:  # one where the sampler fills up the last batch with samples of the beginning
        return Skipped("the order is not shuffled")
    if order != indices_of(later)[:length]:
        return Passed()
    text = f"two epochs have the same order of {length} samples on rank {rank}"
    advice = "call `sampler.set_epoch(epoch)` before each epoch, unless the order is fixed on purpose, as by length"
    return Finding(text, advice, pitfall="set_epoch_forgotten")


def check_evaluation_samples(records: list[Record]) -> Result:
    """Passed if each sample is evaluated once, or all on each rank; a Finding if padding is evaluated too."""
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
