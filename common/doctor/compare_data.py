"""Checks of the data: in training each sample belongs to one rank, in evaluation each counts once.

Some samples are on two ranks although nothing is wrong: a sampler draws with replacement or goes round for ever, or the
data set has some samples twice. Such a cause knows nothing of ranks, so it also brings a sample twice to one rank: with
two ranks, in half of the cases. If many samples are on several ranks, and none is twice on one, there is a mistake.
"""

from collections import Counter
from itertools import pairwise

from common.doctor.answers import Answer, Finding, Healthy, Unseen
from common.doctor.record import Pass, Record

ALIKE = 0.9  # of the samples that two ranks have read, for them to be the same: labels alone agree by chance
CHANCE = 1e-4  # a probability: what is less probable is not taken for chance
ORDERED = 16  # samples that an order needs to be told from another
Row = tuple[int, ...]  # the contents of a sample: a fingerprint for each of its tensors
WORK_OF_ONE = "All processes do the work of one: nobody deals the samples out among them."


def training_passes(record: Record) -> list[Pass]:
    """The passes with forwards in training; where there are parallel ones, those only."""
    passes = [one for one in record.passes if one.forwards]
    return [one for one in passes if one.in_parallel] or passes


def why_not(passes: tuple[Pass, ...]) -> str | None:
    """Why the numbers of the samples of these passes, one of each rank, cannot be compared."""
    if any(one.samples is None or one.size is None for one in passes):
        return "the samples have no numbers"
    if len({one.size for one in passes}) > 1:
        return "the ranks have data sets of different sizes"
    return None


def shards(records: list[Record]) -> Answer:
    answers = []
    for epoch, passes in enumerate(zip(*map(training_passes, records), strict=False)):
        answers.append(_shards_of_epoch(epoch, passes))
    for kind in (Finding, Healthy, Unseen):
        for answer in answers:
            if isinstance(answer, kind):
                return answer
    return Unseen("no pass over a DataLoader was seen in training on all ranks")


def _shards_of_epoch(epoch: int, passes: tuple[Pass, ...]) -> Answer:
    if all(one.shares == one.forwards <= one.batches for one in passes):
        return Unseen("the script itself cuts each rank's share out of a batch")
    if _is_one_stream(passes):
        return Finding(
            f"each rank read the same {len(passes[0].contents)} contents in the same order in epoch {epoch}",
            "let each rank read a part of its own, which it chooses by its rank, or draw with a seed of its own",
            why=WORK_OF_ONE,
        )
    reason = why_not(passes)
    if reason:
        return Unseen(reason)
    if min(one.batches for one in passes) < 2:
        return Unseen("fewer than two batches were read")
    # The last batch may be filled up with samples of the beginning.
    bodies = [one.samples[: -one.last_batch] for one in passes]
    if any(len(set(body)) < len(body) for body in bodies):
        return Unseen("the sampler repeats samples")
    visits = Counter(number for body in bodies for number in body)
    shared = {number for number, ranks in visits.items() if ranks > 1}
    rows = [dict(zip(body, one.contents, strict=False)) for body, one in zip(bodies, passes, strict=True)]
    if not shared:
        return _equal_contents(epoch, passes, rows)
    if passes[0].contents and not _are_the_same(shared, rows):
        return Unseen("a number has other contents on another rank: a data set of its own, or changes with each read")
    if not all(one.each_once for one in passes) and _may_be_chance(len(shared), passes):
        return Unseen(f"{len(shared)} numbers were read by several ranks, which may be the sampler's chance")
    return _not_shards(len(shared), len(visits), epoch, passes)


def _equal_contents(epoch: int, passes: tuple[Pass, ...], rows: list[dict[int, Row]]) -> Answer:
    """The contents of samples, none of which is on two ranks by its number: each rank may number them in its own way.

    Samples that the data set has twice are often both on one rank, unless neighbours are dealt out one by one.
    """
    contents = [set(of_rank.values()) for of_rank in rows]
    compared = set().union(*contents)
    shared = sum(map(len, contents)) - len(compared)
    twice_on_one = sum(map(len, contents)) < sum(map(len, rows))
    dealt_at_random = all(one.each_once and one.samples != sorted(one.samples) for one in passes)
    if twice_on_one or not dealt_at_random or _may_be_chance(shared, passes):
        samples = " + ".join(str(len(one.samples)) for one in passes)
        return Healthy(f"by their numbers none is on two ranks ({samples} samples)")
    return Finding(
        f"without the last batch, {shared} of {len(compared)} whose contents were compared were read by several ranks "
        f"in epoch {epoch}, under another number on each, and none twice by one rank",
        "shuffle and split the data set with the same seed on all ranks, before a sampler deals it out",
        pitfall="different_orders",
        why="The data set has another order on each rank: ranks with different numbers then read the same samples.",
    )


def _are_the_same(shared: set[int], rows: list[dict[int, Row]]) -> bool:
    """True where the numbers that several ranks have read are one sample each.

    Augmentation changes some tensors of a sample at each read: the steadiest decides, the label for example.
    """
    pairs = []
    for of_rank in rows[1:]:
        for number in shared & of_rank.keys() & rows[0].keys():
            pairs.append((rows[0][number], of_rank[number]))
    for place in range(min((len(row) for row, _ in pairs), default=0)):
        alike = sum(mine[place] == its[place] for mine, its in pairs)
        distinct = {mine[place] for mine, _ in pairs}
        if alike >= ALIKE * len(pairs) and len(distinct) > 1:
            return True
    return False


def _is_one_stream(passes: tuple[Pass, ...]) -> bool:
    """True where all ranks have read samples of the same contents in the same order, under other numbers or none."""
    first, *others = passes
    if len(set(first.contents)) < ORDERED or not first.in_parallel:
        return False
    if first.samples and _read_the_same_numbers(passes):
        return False
    return all(one.contents == first.contents for one in others)


def _read_the_same_numbers(passes: tuple[Pass, ...]) -> bool:
    return all(one.samples == passes[0].samples for one in passes)


def _may_be_chance(shared: int, passes: tuple[Pass, ...]) -> bool:
    """True where so many samples that are dealt twice, at random, may be on different ranks each time."""
    if _read_the_same_numbers(passes):
        return False
    return (1 - 1 / len(passes)) ** shared > CHANCE


def _not_shards(shared: int, read: int, epoch: int, passes: tuple[Pass, ...]) -> Finding:
    advice = "deal one order out among the ranks, with one seed on all of them, as DistributedSampler does"
    if _read_the_same_numbers(passes):
        text = f"each rank read the same {len(passes[0].samples)} in the same order in epoch {epoch}"
        return Finding(text, advice, why=WORK_OF_ONE)
    text = f"without the last batch, {shared} of {read} were read by several ranks in epoch {epoch}"
    return Finding(text, advice, pitfall="different_orders")


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
                return Healthy("the order is not shuffled")
            compared += 1
            if order == later.samples[:length]:
                return Finding(
                    f"two epochs have {length} of {length} samples in the same places on rank {record.rank}",
                    "call `sampler.set_epoch(epoch)` before each epoch",
                    pitfall="set_epoch_forgotten",
                )
    if not compared:
        return Unseen("no two epochs of a DataLoader were seen")
    return Healthy(f"another one in each epoch ({compared} compared)")


def evaluation(records: list[Record]) -> Answer:
    of_ranks = [[one for one in record.passes if not one.forwards and one.complete] for record in records]
    answer: Answer = Unseen("no evaluation was seen whole on all ranks")
    for number, passes in enumerate(zip(*of_ranks, strict=False)):
        reason = why_not(passes)
        if not all(one.plain for one in passes):
            reason = "a library deals them out, and may drop what it repeats when metrics are gathered"
        if reason:
            answer = answer if isinstance(answer, Healthy) else Unseen(reason)
            continue
        size = passes[0].size
        visits = Counter(sample for one in passes for sample in one.samples)
        if all(len(set(one.samples)) == len(visits) for one in passes):
            answer = Healthy(f"each rank evaluates the same {len(visits)}")
            continue
        twice = sum(times > 1 for times in visits.values())
        missing = size - len(visits)
        tail = sum(one.last_batch for one in passes)
        if twice or 0 < missing <= tail:  # more are missing where somebody evaluates a part
            return Finding(
                f"{twice} of {size} are read more than once, {missing} never, in evaluation {number}",
                "use a sampler that neither repeats nor drops samples, as common/eval_sampler.py has one",
                pitfall="padded_evaluation",
            )
        answer = Healthy(f"{len(visits)} of {size}, each once")
    return answer
