"""Checks of the data: in training each sample belongs to one rank, in evaluation each counts once.

Some samples are on two ranks although nothing is wrong: a sampler draws with replacement or goes round for ever, or the
data set has some samples twice. Such a cause knows nothing of ranks, so it also brings a sample twice to one rank: with
two ranks, in half of the cases. If many samples are on several ranks, and none is twice on one, there is a mistake.
"""

from collections import Counter
from itertools import pairwise

from common.doctor.answers import Answer, Finding, Healthy, Unseen
from common.doctor.compare_contents import Contents, Overlap, rows_of_pass
from common.doctor.record import Pass, Record

COINCIDENCE = 0.05  # of the samples: up to here equal contents may be of two samples
CHANCE = 1e-4  # a probability: what is less probable is not taken for chance
ORDERED = 16  # samples that an order needs to be told from another


def training_passes(record: Record) -> list[Pass]:
    """The passes with forwards in training; where there are parallel ones, those only."""
    passes = [one for one in record.passes if one.forwards]
    return [one for one in passes if one.in_parallel] or passes


def together(of_ranks: list[list[Pass]]) -> list[tuple[Pass, ...]]:
    return list(zip(*of_ranks, strict=False))


def contents_of(passes: list[tuple[Pass, ...]]) -> list[Contents]:
    """For each pass the contents of all passes over its DataLoader."""
    by_loader: dict[tuple[int, ...], list[tuple[Pass, ...]]] = {}
    for of_ranks in passes:
        by_loader.setdefault(_loaders(of_ranks), []).append(of_ranks)
    contents = {loaders: Contents(of_loader) for loaders, of_loader in by_loader.items()}
    return [contents[_loaders(of_ranks)] for of_ranks in passes]


def _loaders(of_ranks: tuple[Pass, ...]) -> tuple[int, ...]:
    return tuple(one.loader for one in of_ranks)


def why_not(passes: tuple[Pass, ...], contents: Contents) -> str | None:
    """Why the numbers of the samples of these passes, one of each rank, cannot be compared."""
    if any(one.samples is None or one.size is None for one in passes):
        return "the samples have no numbers"
    if len({one.size for one in passes}) > 1:
        return "the ranks have data sets of different sizes"
    if contents.other and contents.read_again:
        return "a number is another sample on another rank: each rank has a data set, or an order, of its own"
    if contents.other:
        return "a number has other contents on another rank: a data set of its own, or changes with each read"
    return None


def shards(records: list[Record]) -> Answer:
    topic = "training samples"
    passes = together([training_passes(record) for record in records])
    if not passes:
        return Unseen(topic, "no pass over a DataLoader was seen in training on all ranks")
    answers = []
    for epoch, (of_ranks, contents) in enumerate(zip(passes, contents_of(passes), strict=True)):
        answer = _shards_of_epoch(epoch, of_ranks, contents)
        if isinstance(answer, Finding):
            return answer
        answers.append(answer)
    return next((answer for answer in answers if isinstance(answer, Healthy)), answers[0])


def _shards_of_epoch(epoch: int, passes: tuple[Pass, ...], contents: Contents) -> Answer:
    topic = "training samples"
    if all(one.shares == one.forwards <= one.batches for one in passes):
        return Unseen(topic, "the script itself cuts each rank's share out of a batch")
    if _is_one_stream(passes):
        return _not_shards_but_one_stream(epoch, passes)
    reason = why_not(passes, contents) or _why_not_shards(passes)
    # The last batch may be filled up with samples of the beginning.
    overlap = contents.overlap([rows_of_pass(one, -one.last_batch) for one in passes])
    if overlap and overlap.shared > COINCIDENCE * overlap.compared and _ordered_apart(passes, contents, overlap):
        return Finding(
            topic,
            f"without the last batch, {overlap.shared} of {overlap.compared} whose contents were compared were read by "
            f"several ranks in epoch {epoch}, under another number on each, and none twice by one rank",
            "different_orders",
            "shuffle and split the data set with the same seed on all ranks, before a sampler deals it out",
            "The data set has another order on each rank: ranks with different numbers then read the same samples.",
        )
    if reason:
        return Unseen(topic, reason)
    visits: Counter[int] = Counter()
    for one in passes:
        visits.update(set(one.samples[: -one.last_batch]))
    shared = [sample for sample, ranks in visits.items() if ranks > 1]
    if shared and contents.known and not contents.same:
        return Unseen(topic, "no tensor of a sample is the same at each read, and tells it from others")
    each_once = all(one.each_once for one in passes)
    if shared and not each_once and _may_be_chance(len(shared), passes):
        return Unseen(topic, f"{len(shared)} numbers were read by several ranks, which may be the sampler's chance")
    if shared:
        return _not_shards(len(shared), len(visits), epoch, passes)
    reason = _ambiguous(contents, overlap)
    if reason:
        return Unseen(topic, reason)
    sizes = ", ".join(str(len(one.samples)) for one in passes)
    return Healthy(topic, f"{_apart(passes, contents, overlap)}; rank by rank {sizes} in epoch {epoch}")


def _is_one_stream(passes: tuple[Pass, ...]) -> bool:
    """True where all ranks have read samples of the same contents in the same order, under other numbers or none."""
    first, *others = passes
    distinct = {tuple(row) for row in first.contents}
    if len(distinct) < ORDERED or not first.in_parallel:
        return False
    if first.samples and _read_the_same_numbers(passes):
        return False
    return all(one.contents == first.contents for one in others)


def _read_the_same_numbers(passes: tuple[Pass, ...]) -> bool:
    return all(one.samples == passes[0].samples for one in passes)


def _not_shards_but_one_stream(epoch: int, passes: tuple[Pass, ...]) -> Finding:
    return Finding(
        "training samples",
        f"each rank read the same {len(passes[0].contents)} contents in the same order in epoch {epoch}",
        None,
        "let each rank read a part of its own, which it chooses by its rank, or draw with a seed of its own",
        f"{len(passes)} processes do the work of one: nobody deals the samples out among them.",
    )


def _ordered_apart(passes: tuple[Pass, ...], contents: Contents, overlap: Overlap) -> bool:
    """True where equal contents under two numbers are one sample: each rank numbers the samples in another way."""
    if contents.other:
        return True
    if contents.same or any(one.samples == sorted(one.samples) for one in passes):
        return False  # samples that are twice in the data set may be dealt to two ranks each time
    return all(one.each_once for one in passes) and not _may_be_chance(overlap.shared, passes)


def _may_be_chance(shared: int, passes: tuple[Pass, ...]) -> bool:
    """True where so many samples that are dealt twice, at random, may be on different ranks each time."""
    if _read_the_same_numbers(passes):
        return False
    return (1 - 1 / len(passes)) ** shared > CHANCE


def _ambiguous(contents: Contents, overlap: Overlap | None) -> str | None:
    if overlap and overlap.shared > COINCIDENCE * overlap.compared and not contents.same:
        return (
            f"no number of a sample is on two ranks, but {overlap.shared} of {overlap.compared} contents are: the data "
            "set has samples twice, or each rank has ordered it by itself (more epochs or samples tell which)"
        )
    return None


def _apart(passes: tuple[Pass, ...], contents: Contents, overlap: Overlap | None) -> str:
    padding = ""
    distinct = len({sample for one in passes for sample in one.samples})
    repeated = sum(len(one.samples) for one in passes) - distinct
    if repeated and all(one.complete for one in passes):
        padding = f" but for a padded end, which repeats {repeated} of {distinct}"
    if overlap and contents.compared and not overlap.shared:
        return f"no sample on two ranks{padding} ({overlap.compared} contents compared)"
    if not contents.known:
        reason = "not seen"
    elif not contents.read_again:
        reason = "read once, which may change them"
    elif not contents.places:
        reason = "changed by each read"
    elif overlap:
        reason = f"alike {overlap.shared} times"
    else:
        reason = "shared by several samples, as labels are"
    return f"no sample on two ranks, by their numbers{padding} (contents {reason})"


def _why_not_shards(passes: tuple[Pass, ...]) -> str | None:
    if min(one.batches for one in passes) < 2:
        return "fewer than two batches were read"
    for one in passes:
        body = one.samples[: -one.last_batch]
        if one.replacement or len(set(body)) < len(body):
            return "the sampler repeats samples"
    return None


def _not_shards(shared: int, read: int, epoch: int, passes: tuple[Pass, ...]) -> Finding:
    distributed = "Distributed" in passes[0].sampler
    if distributed:
        advice = "give the sampler, and what splits the data set, the same seed on all ranks, and each its own rank"
    else:
        advice = f"deal one order out among the ranks, as DistributedSampler does; now it is a {passes[0].sampler}"
    if _read_the_same_numbers(passes):
        return Finding(
            "training samples",
            f"each rank read the same {len(passes[0].samples)} in the same order in epoch {epoch}",
            None,
            advice,
            f"{len(passes)} processes do the work of one: nobody deals the samples out among them.",
        )
    text = f"without the last batch, {shared} of {read} were read by several ranks in epoch {epoch}"
    visited = {sample for one in passes for sample in one.samples}
    missing = passes[0].size - len(visited)
    if all(one.complete for one in passes):
        text += f", and {missing} of {passes[0].size} by none at all"
    return Finding("training samples", text, "different_orders", advice)


def orders(records: list[Record]) -> Answer:
    topic = "order of the epochs"
    compared = 0
    for record in records:
        passes = [one for one in training_passes(record) if one.samples and len(one.samples) >= ORDERED]
        for one, later in pairwise(passes):
            if one.loader != later.loader:
                continue
            length = min(len(one.samples), len(later.samples))
            order = one.samples[:length]
            if order == sorted(order):
                return Healthy(topic, "the order is not shuffled")
            compared += 1
            if order == later.samples[:length]:
                return Finding(
                    topic,
                    f"two epochs have {length} of {length} samples in the same places on rank {record.rank}",
                    "set_epoch_forgotten",
                    "call `sampler.set_epoch(epoch)` before each epoch",
                )
    if not compared:
        return Unseen(topic, "no two epochs of a DataLoader were seen")
    return Healthy(topic, f"another one in each epoch ({compared} compared)")


def evaluation(records: list[Record]) -> Answer:
    topic = "evaluation samples"
    of_ranks = [[one for one in record.passes if not one.forwards and one.complete] for record in records]
    passes = together(of_ranks)
    if not passes:
        evaluated = max(map(len, of_ranks))
        return Unseen(topic, "rank 0 or another one evaluates alone" if evaluated else "no evaluation was seen whole")
    healthy = None
    reasons = []
    for number, (of_pass, contents) in enumerate(zip(passes, contents_of(passes), strict=True)):
        reason = why_not(of_pass, contents)
        if not all(one.plain for one in of_pass):
            reason = "a library deals them out, and may drop what it repeats when metrics are gathered"
        overlap = contents.overlap([rows_of_pass(one) for one in of_pass])
        reason = reason or _ambiguous(contents, overlap)
        if reason:
            reasons.append(reason)
            continue
        size = of_pass[0].size
        visits = Counter(sample for one in of_pass for sample in one.samples)
        if all(len(set(one.samples)) == len(visits) for one in of_pass):
            healthy = healthy or f"each rank evaluates the same {len(visits)}"
            continue
        twice = sum(1 for times in visits.values() if times > 1)
        missing = size - len(visits)
        tail = sum(one.last_batch for one in of_pass)
        if twice or 0 < missing <= tail:  # more are missing where somebody evaluates a part
            return Finding(
                topic,
                f"{twice} of {size} are read more than once, {missing} never, in evaluation {number}",
                "padded_evaluation",
                "use a sampler that neither repeats nor drops samples, as common/accelerator/sampler.py has one",
            )
        healthy = f"{len(visits)} of {size}, each once"
        if not (overlap and contents.compared and not overlap.shared):
            healthy += ", by their numbers"
    return Healthy(topic, healthy) if healthy else Unseen(topic, reasons[0])
