"""Checks of the data: in training each sample belongs to one rank, and in evaluation each sample counts once.

Samples are compared by their numbers in the data set, and where that is not enough by fingerprints of their tensors.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import chain, pairwise

from common.doctor.answers import Answer, Finding, Right, Unseen, overall
from common.doctor.record import Epoch, Record, across_ranks

SAME_FRACTION = 0.9  # of the samples that were read twice must have equal contents: some labels agree by chance
MIN_SAMPLES = 16  # that have something in common; of fewer it may be chance

OfRanks = tuple[Epoch, ...]  # one epoch, as each rank has seen it
Content = tuple[int, ...]  # a fingerprint of each tensor of a sample


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
    epochs = across_ranks(map(training_epochs, records))
    answers = [_shards_of(number, of_ranks) for number, of_ranks in enumerate(epochs)]
    return overall(answers, "no pass over a DataLoader was seen in training on all ranks")


def _shards_of(number: int, of_ranks: OfRanks) -> Answer:
    """The answer about an epoch: that of the first case which is true.

    case                                                    answer
    the script cuts each rank's share out of a batch        Unseen
    samples without numbers, the same contents on all       Finding
    other samples without numbers                           Unseen
    fewer than two batches                                  Unseen
    a rank has read a sample twice                          Unseen: the sampler draws with replacement
    no sample was read by two ranks                         Right
    a number has other contents on another rank             Unseen: `data_sets` examines that
    all ranks have read the same samples in one order       Finding
    fewer than MIN_SAMPLES were read by two ranks           Unseen: a sampler that starts anew shares a few
    more were                                               Finding
    """
    if all(epoch.shares == epoch.forwards <= epoch.batches for epoch in of_ranks):
        return Unseen("the script itself cuts each rank's share out of a batch")
    unseen = incomparable(of_ranks)
    if unseen:
        contents = of_ranks[0].contents
        all_equal = all(epoch.contents == contents for epoch in of_ranks)
        if not all_equal or len(set(contents)) < MIN_SAMPLES:
            return unseen
        return Finding(
            f"each rank read {len(contents)} samples with the same contents in the same order in epoch {number}",
            "let each rank read a part of its own, which it chooses by its rank, or draw with a seed of its own",
        )
    if min(epoch.batches for epoch in of_ranks) < 2:
        return Unseen("fewer than two batches were read")
    # The last batch may be filled up with samples of the beginning.
    shares = [epoch.samples[: -epoch.last_batch] for epoch in of_ranks]
    if any(len(share) > len(set(share)) for share in shares):
        return Unseen("the sampler repeats samples")
    readers = Counter(chain.from_iterable(shares))  # the number of ranks that have read a sample
    shared = sum(ranks > 1 for ranks in readers.values())
    if not shared:
        return Right()
    twice = read_by_two([_contents([epoch]) for epoch in of_ranks])
    if of_ranks[0].contents and not are_the_same(twice):
        return Unseen("a number has other contents on another rank: a data set of its own, or changes with each read")
    advice = "deal one order out among the ranks, with one seed on all of them, as DistributedSampler does"
    samples = of_ranks[0].samples
    if all(epoch.samples == samples for epoch in of_ranks):
        return Finding(f"each rank read the same {len(samples)} samples in the same order in epoch {number}", advice)
    if shared < MIN_SAMPLES:
        return Unseen(f"{shared} samples were read by several ranks, which may be the sampler's chance")
    text = f"without the last batch, {shared} of {len(readers)} samples were read by several ranks in epoch {number}"
    return Finding(text, advice, pitfall="different_orders")


def _contents(epochs: Iterable[Epoch]) -> dict[int, list[Content]]:
    """The contents that one rank has read under each number."""
    found = defaultdict(list)
    for epoch in epochs:
        for sample, content in zip(epoch.samples or [], epoch.contents, strict=False):
            found[sample].append(content)
    return found


def read_by_two(of_ranks: list[dict[int, list[Content]]]) -> list[tuple[Content, Content]]:
    """The two contents of each sample that rank 0 and another rank have read."""
    of_rank_0, *others = of_ranks
    pairs = []
    for of_another in others:
        for sample in of_rank_0.keys() & of_another.keys():
            pairs.append((of_rank_0[sample][0], of_another[sample][0]))
    return pairs


def are_the_same(pairs: list[tuple[Content, Content]]) -> bool:
    """True if the two contents of each pair are of one sample.

    Augmentation changes some tensors of a sample at each read, but not the label. So one equal tensor is enough.
    """
    tensors = min((len(one) for one, _ in pairs), default=0)
    for tensor in range(tensors):
        equal = sum(one[tensor] == other[tensor] for one, other in pairs)
        distinct = {one[tensor] for one, _ in pairs}
        if equal >= SAME_FRACTION * len(pairs) and len(distinct) > 1:
            return True
    return False


def data_sets(records: list[Record]) -> Answer:
    """The answer about the data sets of the ranks: a number must be the same sample on all of them.

    Over several epochs a sample is read by several ranks, whose contents can be compared. A sample that changes at each
    read, as with augmentation, also differs between two reads of one rank: then there is nothing to compare.
    """
    if not isinstance(shards(records), Right):
        return Unseen("the samples are not dealt out among the ranks by their numbers")
    of_ranks = []
    for record in records:
        epochs = training_epochs(record)
        of_ranks.append(_contents(epoch for epoch in epochs if epoch.loader == epochs[0].loader))
    read_again = []
    for of_rank in of_ranks:
        for contents in of_rank.values():
            if len(contents) > 1:
                read_again.append((contents[0], contents[1]))
    twice = read_by_two(of_ranks)
    if min(len(read_again), len(twice)) < MIN_SAMPLES:
        return Unseen("too few samples were read again, by the same rank and by another one")
    if not are_the_same(read_again):
        return Unseen("the samples change with each read")
    if are_the_same(twice):
        return Right()
    return Finding(
        f"the sampler deals out numbers, but {len(twice)} samples have other contents on another rank",
        "make the data alike on all ranks: draw them, and any random split, with the same seed",
    )


def orders(records: list[Record]) -> Answer:
    answers = []
    for record in records:
        epochs = [epoch for epoch in training_epochs(record) if len(epoch.samples or []) >= MIN_SAMPLES]
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
        return Unseen("a library deals out the samples, and may drop those that it repeats when metrics are gathered")
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
        f"{repeated} of {size} samples are read more than once, {missing} never, in evaluation {number}",
        "use a sampler that neither repeats nor drops samples, as common/eval_sampler.py has one",
        pitfall="padded_evaluation",
    )
