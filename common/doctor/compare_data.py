"""Checks of the data: in training each sample belongs to one rank, in evaluation each counts once.

Some samples are on two ranks although nothing is wrong: a sampler draws with replacement or goes round for ever. It
then also brings a sample twice to one rank, or only a few to both.
"""

from collections import Counter
from itertools import chain, pairwise

from common.doctor.answers import Answer, Finding, Right, Unseen, overall
from common.doctor.record import Epoch, Record, across_ranks

ALIKE = 0.9  # of the samples that two ranks have read, for them to be the same: labels alone agree by chance
CHANCE = 1e-4  # a probability: what is less probable is not taken for chance
ORDERED = 16  # samples that an order needs to be told from another

OfRanks = tuple[Epoch, ...]  # one epoch, as each rank has seen it


def training_epochs(record: Record) -> list[Epoch]:
    """The epochs with forwards in training."""
    return [epoch for epoch in record.epochs if epoch.forwards]


def incomparable(of_ranks: OfRanks) -> Unseen | None:
    """Why the samples of the ranks cannot be compared by their numbers; None where they can."""
    if any(epoch.samples is None or epoch.size is None for epoch in of_ranks):
        return Unseen("the samples have no numbers")
    if len({epoch.size for epoch in of_ranks}) > 1:
        return Unseen("the ranks have data sets of different sizes")
    return None


def shards(records: list[Record]) -> Answer:
    answers = []
    for number, of_ranks in enumerate(across_ranks(map(training_epochs, records))):
        answers.append(_shards_of_epoch(number, of_ranks))
    return overall(answers, "no pass over a DataLoader was seen in training on all ranks")


def _shards_of_epoch(number: int, of_ranks: OfRanks) -> Answer:
    if all(epoch.shares == epoch.forwards <= epoch.batches for epoch in of_ranks):
        return Unseen("the script itself cuts each rank's share out of a batch")
    unseen = incomparable(of_ranks)
    if unseen:
        return _same_contents(number, of_ranks) or unseen
    if min(epoch.batches for epoch in of_ranks) < 2:
        return Unseen("fewer than two batches were read")
    # The last batch may be filled up with samples of the beginning.
    shares = [epoch.samples[: -epoch.last_batch] for epoch in of_ranks]
    for share in shares:
        if len(share) > len(set(share)):
            return Unseen("the sampler repeats samples")
    readers = Counter(chain.from_iterable(shares))  # the number of ranks that have read a sample
    shared = {sample for sample, ranks in readers.items() if ranks > 1}
    if not shared:
        return Right()
    return _read_by_several(shared, len(readers), number, of_ranks)


def _read_by_several(shared: set[int], read: int, number: int, of_ranks: OfRanks) -> Finding | Unseen:
    """The answer about numbers that several ranks have read, of all the numbers `read`."""
    if of_ranks[0].contents and not _are_the_same(shared, of_ranks):
        return Unseen("a number has other contents on another rank: a data set of its own, or changes with each read")
    advice = "deal one order out among the ranks, with one seed on all of them, as DistributedSampler does"
    samples = of_ranks[0].samples
    if all(epoch.samples == samples for epoch in of_ranks):
        return Finding(f"each rank read the same {len(samples)} in the same order in epoch {number}", advice)
    # Of samples drawn at random, each that comes twice would come to one rank twice with a probability of 1 in W.
    by_chance = (1 - 1 / len(of_ranks)) ** len(shared)
    if by_chance > CHANCE:
        return Unseen(f"{len(shared)} numbers were read by several ranks, which may be the sampler's chance")
    text = f"without the last batch, {len(shared)} of {read} were read by several ranks in epoch {number}"
    return Finding(text, advice, pitfall="different_orders")


def _same_contents(number: int, of_ranks: OfRanks) -> Finding | None:
    """The finding that all ranks have read the same, where samples have no numbers."""
    contents = of_ranks[0].contents
    if any(epoch.contents != contents for epoch in of_ranks):
        return None
    if len(set(contents)) < ORDERED:
        return None
    return Finding(
        f"each rank read the same {len(contents)} contents in the same order in epoch {number}",
        "let each rank read a part of its own, which it chooses by its rank, or draw with a seed of its own",
    )


def _are_the_same(shared: set[int], of_ranks: OfRanks) -> bool:
    """True where the numbers that several ranks have read are one sample each.

    Augmentation changes some tensors of a sample at each read: the steadiest decides, the label for example.
    """
    contents_of_ranks = [dict(zip(epoch.samples, epoch.contents, strict=False)) for epoch in of_ranks]
    of_rank_0 = contents_of_ranks[0]
    pairs = []
    for of_another in contents_of_ranks[1:]:
        for sample in shared & of_rank_0.keys() & of_another.keys():
            pairs.append((of_rank_0[sample], of_another[sample]))
    tensors = min((len(mine) for mine, _ in pairs), default=0)
    for tensor in range(tensors):
        equal = sum(mine[tensor] == its[tensor] for mine, its in pairs)
        distinct = {mine[tensor] for mine, _ in pairs}
        if equal >= ALIKE * len(pairs) and len(distinct) > 1:
            return True
    return False


def orders(records: list[Record]) -> Answer:
    answers = []
    for record in records:
        epochs = [epoch for epoch in training_epochs(record) if len(epoch.samples or []) >= ORDERED]
        for earlier, later in pairwise(epochs):
            if earlier.loader == later.loader:
                answers.append(_order(record.rank, earlier.samples, later.samples))
    return overall(answers, "no two epochs of a DataLoader were seen")


def _order(rank: int, earlier: list[int], later: list[int]) -> Answer:
    length = min(len(earlier), len(later))
    order = earlier[:length]
    if order == sorted(order):
        return Unseen("the order is not shuffled")
    if order != later[:length]:
        return Right()
    return Finding(
        f"two epochs have {length} of {length} samples in the same places on rank {rank}",
        "call `sampler.set_epoch(epoch)` before each epoch",
        pitfall="set_epoch_forgotten",
    )


def evaluation(records: list[Record]) -> Answer:
    evaluations = []
    for record in records:
        evaluations.append([epoch for epoch in record.epochs if not epoch.forwards and epoch.complete])
    answers = []
    for number, of_ranks in enumerate(across_ranks(evaluations)):
        answers.append(_one_evaluation(number, of_ranks))
    return overall(answers, "no evaluation was seen whole on all ranks")


def _one_evaluation(number: int, of_ranks: OfRanks) -> Answer:
    if not all(epoch.plain for epoch in of_ranks):
        return Unseen("a library deals them out, and may drop what it repeats when metrics are gathered")
    unseen = incomparable(of_ranks)
    if unseen:
        return unseen
    reads = Counter(chain.from_iterable(epoch.samples for epoch in of_ranks))
    distinct = [set(epoch.samples) for epoch in of_ranks]
    each_reads_all = all(of_rank == reads.keys() for of_rank in distinct)
    size = of_ranks[0].size
    repeated = sum(times > 1 for times in reads.values())
    missing = size - len(reads)
    tail = sum(epoch.last_batch for epoch in of_ranks)
    some_dropped = 0 < missing <= tail  # more are missing where somebody evaluates a part
    if each_reads_all or not (repeated or some_dropped):
        return Right()
    return Finding(
        f"{repeated} of {size} are read more than once, {missing} never, in evaluation {number}",
        "use a sampler that neither repeats nor drops samples, as common/eval_sampler.py has one",
        pitfall="padded_evaluation",
    )
