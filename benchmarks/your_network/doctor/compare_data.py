"""Checks of the data: in training each sample belongs to one rank, in evaluation each counts once."""

from collections import Counter
from itertools import pairwise

from benchmarks.your_network.doctor.answers import Answer, Finding, Healthy, Unseen
from benchmarks.your_network.doctor.record import Pass, Record

ALIKE = 0.9  # of the samples, for two data sets to be taken for one
ORDERED = 16  # samples that an order needs to be told from another


def training_passes(record: Record) -> list[Pass]:
    """The passes with forwards in training; where there are parallel ones, those only."""
    passes = [one for one in record.passes if one.forwards]
    return [one for one in passes if one.in_parallel] or passes


def together(of_ranks: list[list[Pass]]) -> list[tuple[Pass, ...]]:
    return list(zip(*of_ranks, strict=False))


def why_not(passes: tuple[Pass, ...]) -> str | None:
    """Why the samples of these passes, one of each rank, cannot be compared."""
    if any(one.samples is None or one.size is None for one in passes):
        return "the samples have no numbers"
    if len({one.size for one in passes}) > 1 or not _same_contents(passes):
        return "each rank has a data set of its own"
    return None


def _same_contents(passes: tuple[Pass, ...]) -> bool:
    """Samples of one number are one sample: as a rule one of its tensors is equal, the label for example."""
    first = passes[0].contents
    for other in passes[1:]:
        shared = first.keys() & other.contents.keys()
        alike: Counter[int] = Counter()
        for sample in shared:
            pairs = zip(first[sample], other.contents[sample], strict=False)
            alike.update(place for place, (mine, its) in enumerate(pairs) if mine == its)
        has_tensors = any(first[sample] for sample in shared)
        if has_tensors and max(alike.values(), default=0) < ALIKE * len(shared):
            return False
    return True


def shards(records: list[Record]) -> Answer:
    topic = "training samples"
    passes = together([training_passes(record) for record in records])
    if not passes:
        return Unseen(topic, "no pass over a DataLoader was seen in training on all ranks")
    reasons = []
    for epoch, of_ranks in enumerate(passes):
        reason = why_not(of_ranks) or _why_not_shards(of_ranks)
        if reason:
            reasons.append(reason)
            continue
        # The last batch may be filled up with samples of the beginning.
        bodies = [one.samples[: -one.last_batch] for one in of_ranks]
        visits = Counter(sample for body in bodies for sample in set(body))
        shared = [sample for sample, ranks in visits.items() if ranks > 1]
        if shared:
            return _not_shards(len(shared), len(visits), epoch, of_ranks)
    if len(reasons) == len(passes):
        return Unseen(topic, reasons[0])
    read = [str(len(one.samples or [])) for one in passes[0]]
    return Healthy(topic, f"no sample on two ranks; rank by rank {', '.join(read)} in the first epoch")


def _why_not_shards(passes: tuple[Pass, ...]) -> str | None:
    if min(one.batches for one in passes) < 2:
        return "fewer than two batches were read"
    repeated = [len(set(one.samples)) < len(one.samples) - one.last_batch for one in passes]
    if any(repeated) or any(one.replacement for one in passes):
        return "the sampler repeats samples"
    return None


def _not_shards(shared: int, read: int, epoch: int, passes: tuple[Pass, ...]) -> Finding:
    distributed = "Distributed" in passes[0].sampler
    if distributed:
        advice = "give the sampler the same seed on all ranks, and each its own rank"
    else:
        advice = f"give the DataLoader a DistributedSampler; now it has a {passes[0].sampler}"
    if all(one.samples == passes[0].samples for one in passes):
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
    for number, of_pass in enumerate(passes):
        reason = why_not(of_pass)
        if not all(one.plain for one in of_pass):
            reason = "a library deals them out, and may drop what it repeats when metrics are gathered"
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
    return Healthy(topic, healthy) if healthy else Unseen(topic, reasons[0])
