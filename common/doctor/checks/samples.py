"""`Record.epochs`: each sample trains on one rank, and each epoch has an order of its own."""

from collections import Counter
from itertools import chain, pairwise

from common.doctor.answers import Answer, Finding, NotExamined, Right, overall
from common.doctor.checks.by_rank import NO_NUMBERS, across_ranks, are_numbered_alike, has_repeated
from common.doctor.checks.contents import are_same_samples, read_twice
from common.doctor.record import WITHOUT_FORWARD, Epoch, Record

MIN_SAMPLES = 16  # fewer samples may have something in common, or come in one order, by chance
NEARLY_ALL = 0.9


def check_training_samples(records: list[Record]) -> Answer:
    if any(record.is_split for record in records):
        return NotExamined("on the mesh of the network, ranks may have the same samples")
    of_ranks = across_ranks(record.training_epochs for record in records)
    answers = [_epoch(number, epochs) for number, epochs in enumerate(of_ranks)]
    return overall(answers, "no main thread read a DataLoader between optimizer steps on all ranks")


def read_parts_of_one_order(epochs: tuple[Epoch, ...]) -> bool:
    """True if no sample, by its number, was read twice, be it by one rank or by two."""
    shares = _without_last_batches(epochs)
    samples = list(chain.from_iterable(shares))
    return are_numbered_alike(epochs) and all(shares) and not has_repeated(samples)


def _without_last_batches(epochs: tuple[Epoch, ...]) -> list[list[int]]:
    """What each rank reads but for its last batch, which may be filled up with samples of the beginning."""
    return [epoch.samples[: -len(epoch.batches[-1].samples)] for epoch in epochs]


def _epoch(number: int, epochs: tuple[Epoch, ...]) -> Answer:
    """The answer about one epoch, such as these of six samples, without the last batches:

    0 2 0  1 3 5                not examined: the samples are drawn with replacement
    0 2 4  1 3 5                right: parts of one order
    0 2 4  4 1 3                not examined: few are read twice, as by a sampler that starts anew before its end
    0 … 5  0 … 5                that of `_one_order`
    0 2 4  1 3 5  0 2 4  1 3 5  not examined: all are read by two ranks, and no rank reads all
    0 2 4  2 3 0                found: each rank reads a part of an order of its own
    """
    if not are_numbered_alike(epochs):
        return _by_contents(number, epochs)
    shares = _without_last_batches(epochs)
    if not all(shares):
        return NotExamined("fewer than two batches were read")
    if any(map(has_repeated, shares)):  # 0 2 0, 1 3 5
        return NotExamined("the sampler draws samples with replacement")
    readers = Counter(chain.from_iterable(shares))  # the number of ranks that have read a sample
    shared = sum(ranks > 1 for ranks in readers.values())
    if shared == 0:  # 0 2 4, 1 3 5
        return Right()
    if shared < MIN_SAMPLES:  # 0 2 4, 4 1 3
        return NotExamined(f"{shared} samples were read by several ranks, which may be the sampler's chance")
    if _have_own_data(epochs):
        return NotExamined("a number has other contents on another rank: its own data set, or new with each read")
    first = epochs[0].samples
    if all(epoch.samples == first for epoch in epochs):  # 0 … 5, 0 … 5
        return _one_order(number, epochs)
    of_each_number = Counter(ranks for ranks in readers.values() if ranks > 1)
    have_equally_many_readers = max(of_each_number.values()) > NEARLY_ALL * len(readers)
    no_rank_reads_all = len(first) < NEARLY_ALL * len(readers)
    if have_equally_many_readers and no_rank_reads_all:  # 0 2 4, 1 3 5, 0 2 4, 1 3 5
        return NotExamined("each sample was dealt out several times: repeated augmentation, or too few replicas")
    return Finding(  # 0 2 4, 2 3 0
        f"without the last batch, {shared} of {len(readers)} samples were read by several ranks in epoch {number}",
        "deal one order out among the ranks, with one seed on all of them, as DistributedSampler does",
        pitfall="different_orders",
    )


def _have_own_data(epochs: tuple[Epoch, ...]) -> bool:
    """True if the contents show that a number is not the same sample on all ranks; a few contents do not show it."""
    first, *others = epochs
    pairs = [pair for other in others for pair in read_twice([first], [other])]
    return len(pairs) >= MIN_SAMPLES and not are_same_samples(pairs)


def _by_contents(number: int, epochs: tuple[Epoch, ...]) -> Answer:
    of_ranks = [[content for batch in epoch.batches for content in batch.contents] for epoch in epochs]
    first, *others = of_ranks
    if len(set(first)) < MIN_SAMPLES or others != [first] * len(others):  # a part of a stream
        return NotExamined(NO_NUMBERS)
    return _one_order(number, epochs)


def _one_order(number: int, epochs: tuple[Epoch, ...]) -> Answer:
    for epoch in epochs:
        trained_whole = sum(batch.is_trained_whole for batch in epoch.batches)
        if trained_whole < len(epoch.batches) - WITHOUT_FORWARD:
            return NotExamined("each rank reads all samples, but the script may train it on a part of each batch")
    count = sum(batch.size for batch in epochs[0].batches)
    return Finding(
        f"each rank read the same {count} samples in the same order in epoch {number}",
        "let each rank read its own part: a DistributedSampler deals it out, and a stream chooses it by the rank; "
        "ranks that share the layers or the positions of a sample are meant to read the same",
    )


def check_orders(records: list[Record]) -> Answer:
    answers: list[Answer] = []
    for record in records:
        epochs = [epoch for epoch in record.training_epochs if len(epoch.samples) >= MIN_SAMPLES]
        for data_set in dict.fromkeys(epoch.data_set for epoch in epochs):  # they may be read in turn
            of_one = [epoch for epoch in epochs if epoch.data_set == data_set]
            answers += [_order(record.rank, earlier, later) for earlier, later in pairwise(of_one)]
    return overall(answers, "no two epochs had one data set")


def _order(rank: int, earlier: Epoch, later: Epoch) -> Answer:
    length = min(len(earlier.samples), len(later.samples))
    order = earlier.samples[:length]
    places = {number: place for place, number in enumerate(earlier.numbers)}  # random_split shuffles the numbers
    # Without a length no numbers are known, and a sampler may go beyond it: then a number is its own place.
    read = [places.get(number, number) for number in order]
    descents = sum(place > following for place, following in pairwise(read))
    if descents <= 1:  # one where the sampler fills up the last batch with samples of the beginning
        return NotExamined("the order is not shuffled")
    if order != later.samples[:length]:
        return Right()
    return Finding(
        f"two epochs have the same order of {length} samples on rank {rank}",
        "call `sampler.set_epoch(epoch)` before each epoch, unless the order is fixed on purpose, as by length",
        pitfall="set_epoch_forgotten",
    )
