"""Checks of the data: in training each sample belongs to one rank, in evaluation each counts once.

Some samples are on two ranks although nothing is wrong: a sampler draws with replacement or goes round for ever. It
then also brings a sample twice to one rank, or only a few to both.
"""

from collections import Counter
from itertools import pairwise

from common.doctor.answers import Answer, Finding, Unseen
from common.doctor.record import Pass, Record

ALIKE = 0.9  # of the samples that two ranks have read, for them to be the same: labels alone agree by chance
CHANCE = 1e-4  # a probability: what is less probable is not taken for chance
ORDERED = 16  # samples that an order needs to be told from another


def training_passes(record: Record) -> list[Pass]:
    """The passes with forwards in training."""
    return [one for one in record.passes if one.forwards]


def why_not(passes: tuple[Pass, ...]) -> str | None:
    """Why the numbers of the samples of these passes, one of each rank, cannot be compared."""
    if any(one.samples is None or one.size is None for one in passes):
        return "the samples have no numbers"
    if len({one.size for one in passes}) > 1:
        return "the ranks have data sets of different sizes"
    return None


def shards(records: list[Record]) -> Answer:
    answer: Answer = Unseen("no pass over a DataLoader was seen in training on all ranks")
    for epoch, passes in enumerate(zip(*map(training_passes, records), strict=False)):
        of_epoch = _shards_of_epoch(epoch, passes)
        if isinstance(of_epoch, Finding):
            return of_epoch
        if answer is not None:
            answer = of_epoch
    return answer


def _shards_of_epoch(epoch: int, passes: tuple[Pass, ...]) -> Answer:
    if all(one.shares == one.forwards <= one.batches for one in passes):
        return Unseen("the script itself cuts each rank's share out of a batch")
    reason = why_not(passes)
    if reason:
        contents = passes[0].contents
        ordered = len(set(contents)) >= ORDERED
        if ordered and all(one.contents == contents for one in passes):
            return Finding(
                f"each rank read the same {len(contents)} contents in the same order in epoch {epoch}",
                "let each rank read a part of its own, which it chooses by its rank, or draw with a seed of its own",
            )
        return Unseen(reason)
    if min(one.batches for one in passes) < 2:
        return Unseen("fewer than two batches were read")
    # The last batch may be filled up with samples of the beginning.
    bodies = [one.samples[: -one.last_batch] for one in passes]
    if any(len(set(body)) < len(body) for body in bodies):
        return Unseen("the sampler repeats samples")
    visits = Counter(number for body in bodies for number in body)
    shared = {number for number, ranks in visits.items() if ranks > 1}
    if not shared:
        return None
    in_one_order = all(one.samples == passes[0].samples for one in passes)
    if not in_one_order and (1 - 1 / len(passes)) ** len(shared) > CHANCE:
        return Unseen(f"{len(shared)} numbers were read by several ranks, which may be the sampler's chance")
    if passes[0].contents and not _are_the_same(shared, passes):
        return Unseen("a number has other contents on another rank: a data set of its own, or changes with each read")
    advice = "deal one order out among the ranks, with one seed on all of them, as DistributedSampler does"
    if in_one_order:
        text = f"each rank read the same {len(passes[0].samples)} in the same order in epoch {epoch}"
        return Finding(text, advice)
    text = f"without the last batch, {len(shared)} of {len(visits)} were read by several ranks in epoch {epoch}"
    return Finding(text, advice, pitfall="different_orders")


def _are_the_same(shared: set[int], passes: tuple[Pass, ...]) -> bool:
    """True where the numbers that several ranks have read are one sample each.

    Augmentation changes some tensors of a sample at each read: the steadiest decides, the label for example.
    """
    of_ranks = [dict(zip(one.samples, one.contents, strict=False)) for one in passes]
    first = of_ranks[0]
    pairs = []
    for other in of_ranks[1:]:
        for number in shared & first.keys() & other.keys():
            pairs.append((first[number], other[number]))
    for place in range(min((len(row) for row, _ in pairs), default=0)):
        alike = sum(mine[place] == its[place] for mine, its in pairs)
        distinct = {mine[place] for mine, _ in pairs}
        if alike >= ALIKE * len(pairs) and len(distinct) > 1:
            return True
    return False


def orders(records: list[Record]) -> Answer:
    compared = 0
    for record in records:
        passes = [one for one in training_passes(record) if one.samples and len(one.samples) >= ORDERED]
        for one, later in pairwise(passes):
            if one.loader != later.loader:
                continue
            length = min(len(one.samples), len(later.samples))
            order = one.samples[:length]
            if order == sorted(order):
                return Unseen("the order is not shuffled")
            compared += 1
            if order == later.samples[:length]:
                return Finding(
                    f"two epochs have {length} of {length} samples in the same places on rank {record.rank}",
                    "call `sampler.set_epoch(epoch)` before each epoch",
                    pitfall="set_epoch_forgotten",
                )
    return None if compared else Unseen("no two epochs of a DataLoader were seen")


def evaluation(records: list[Record]) -> Answer:
    of_ranks = [[one for one in record.passes if not one.forwards and one.complete] for record in records]
    answer: Answer = Unseen("no evaluation was seen whole on all ranks")
    for number, passes in enumerate(zip(*of_ranks, strict=False)):
        reason = why_not(passes)
        if not all(one.plain for one in passes):
            reason = "a library deals them out, and may drop what it repeats when metrics are gathered"
        if reason:
            answer = answer and Unseen(reason)
            continue
        answer = None
        visits = Counter(sample for one in passes for sample in one.samples)
        if all(len(set(one.samples)) == len(visits) for one in passes):  # each rank evaluates all of them
            continue
        size = passes[0].size
        twice = sum(times > 1 for times in visits.values())
        missing = size - len(visits)
        tail = sum(one.last_batch for one in passes)
        if twice or 0 < missing <= tail:  # more are missing where somebody evaluates a part
            return Finding(
                f"{twice} of {size} are read more than once, {missing} never, in evaluation {number}",
                "use a sampler that neither repeats nor drops samples, as common/eval_sampler.py has one",
                pitfall="padded_evaluation",
            )
    return answer
