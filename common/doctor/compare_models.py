"""Checks of networks and optimizers: the ranks must be replicas of each other, but draw their own random numbers."""

from torch import Tensor

from common.doctor.answers import Answer, Finding, Unseen
from common.doctor.record import Model, Record

TOLERANCE = 1e-6  # of the largest number of a tensor; ranks that average have equal bits on CPUs
TRAILING_ZEROS = 3  # steps at the end without a learning rate; a schedule may end in one


def difference(of_ranks: list[dict[str, Tensor]]) -> str | None:
    """Where tensors of rank 0 and of another rank are not the same, and how far they are from each other at most."""
    first = of_ranks[0]
    for rank, other in enumerate(of_ranks[1:], 1):
        apart = {}
        for name, values in first.items():
            if name not in other or other[name].shape != values.shape or not values.numel():
                continue
            farthest = (values - other[name]).abs().max().item()
            if farthest > TOLERANCE * values.abs().max().item():
                apart[name] = farthest
        if apart:
            count = f"{len(apart)} of {len(first)} tensors by up to {max(apart.values()):.1e}"
            return f"rank 0 and {rank} differ in {count} ({', '.join(list(apart)[:3])})"
    return None


def trained(records: list[Record]) -> list[list[Model]]:
    """The networks that all ranks have trained: for each the observations of all ranks."""
    of_ranks = [[model for model in record.models if model.forwards] for record in records]
    same = []
    for models in zip(*of_ranks, strict=False):
        kinds = {(model.title, model.parameters) for model in models}
        if len(kinds) == 1:
            same.append(list(models))
    return same


def on_all_ranks(models: list[Model], values: str) -> dict[int, list[dict[str, Tensor]]]:
    """Weights or statistics by the number of steps before them, where all ranks have noted some; of each rank."""
    of_ranks = [getattr(model, values) for model in models]
    steps = {step for step in of_ranks[0] if all(of_rank.get(step) for of_rank in of_ranks)}
    return {step: [of_rank[step] for of_rank in of_ranks] for step in sorted(steps)}


def optimizers(records: list[Record]) -> Answer:
    if not records[0].steps or not trained(records):
        return Unseen("no optimizer step was seen")
    for record in records:
        if record.forgotten and record.orphans:
            names = ", ".join(record.forgotten[:3])
            return Finding(
                f"{record.orphans} are of no network; {len(record.forgotten)} of the network have gradients "
                f"and are in no optimizer ({names})",
                "make the optimizer last, from the parameters that are trained",
                pitfall="replaced_parameters",
            )
    return None


def learning_rates(records: list[Record]) -> Answer:
    steps = min(len(record.rates) for record in records)
    if not steps:
        return Unseen("no optimizer step was seen on all ranks")
    of_rank_0 = records[0].rates
    apart = [step for step in range(steps) if any(other.rates[step] != of_rank_0[step] for other in records)]
    if not apart:
        return None
    first = apart[0]
    at = []
    for record in records:
        rates = " and ".join(f"{rate:.3g}" for rate in dict.fromkeys(record.rates[first]))
        at.append(f"rank {record.rank} has {rates}")
    text = f"differ at {len(apart)} of {steps} steps; at step {first + 1} {', '.join(at)}"
    moved = [any(rates != record.rates[0] for rates in record.rates) for record in records]
    if moved[0] and not any(moved[1:]):
        text += "; it never changes on another rank than rank 0"
        return Finding(text, "let all ranks step the scheduler", pitfall="schedule_on_rank_0")
    return Finding(text, "give all ranks the same learning rate, and let them step the scheduler equally often")


def weights(records: list[Record]) -> Answer:
    networks = trained(records)
    if not networks:
        return Unseen("no network was trained on all ranks")
    compared = 0
    for models in networks:
        apart = {step: difference(of_ranks) for step, of_ranks in on_all_ranks(models, "weights").items()}
        at_first = apart.pop(0, None)
        compared += len(apart)
        first = next((step for step in apart if apart[step]), None)
        # Where only every n-th step averages the weights, they come together again.
        if first is not None and all(apart[step] for step in apart if step > first):
            return _replicas_apart(f"{apart[first]} after step {first}", at_first, models)
    return None if compared else Unseen("no optimizer step was seen on all ranks, or no rank has whole parameters")


def _replicas_apart(text: str, before_training: str | None, models: list[Model]) -> Finding:
    """The finding, with a cause where one was observed."""
    changed = max(len(model.changed) for model in models)
    if changed:
        return Finding(
            f"{text}: {changed} parameters are not those that DistributedDataParallel wrapped",
            "move, convert and unfreeze the network first, and wrap it last",
            pitfall="moved_after_wrapping",
        )
    bypassed = max(models, key=lambda model: model.bypassed)
    if bypassed.bypassed:
        past = f"{bypassed.bypassed} of {bypassed.forwards} forwards in training went past DistributedDataParallel"
        return Finding(
            f"{text}: {past}", "call the wrapper in training, not its `.module`", pitfall="forward_through_module"
        )
    if not any(model.wrapped for model in models):
        return Finding(
            f"{text}: no DistributedDataParallel holds the network",
            "wrap it, and train the wrapper: that copies rank 0's weights, and averages the gradients",
            pitfall="forward_through_module",
        )
    if before_training:
        return Finding(
            f"{before_training} before the first step, though DistributedDataParallel holds the network",
            "load and initialise weights before wrapping, or on all ranks alike",
        )
    return Finding(text, "no further cause was seen: look for `no_sync`, and for updates that not all ranks make")


def random_numbers(records: list[Record]) -> Answer:
    sources = {
        "forwards in training": [record.forward_draws for record in records],
        "batches": [record.batch_draws for record in records],
    }
    seen = 0
    for source, of_ranks in sources.items():
        for kind in of_ranks[0]:
            places = list(zip(*(draws.get(kind, []) for draws in of_ranks), strict=False))
            alike = sum(first in others for first, *others in places)
            seen += len(places)
            if alike and alike == len(places):
                return Finding(
                    f"{alike} of {alike} {source} drew the same numbers on rank 0 and another one ({kind})",
                    "seed with seed + rank once the network is built",
                    pitfall="same_random_numbers",
                )
    return None if seen else Unseen("neither forwards in training nor the reading of batches drew any")


def schedule(records: list[Record]) -> Answer:
    rates = records[0].rates
    if all(step == rates[0] for step in rates):
        return Unseen("the learning rate did not change")
    zeros = 0
    while not any(rates[-1 - zeros]):
        zeros += 1
    if zeros < TRAILING_ZEROS:
        return None
    return Finding(
        f"the learning rate is 0 in the last {zeros} of {len(rates)} steps",
        "write the schedule for as many calls of its `step` as there are",
        pitfall="schedule_too_fast",
    )


def accumulation(records: list[Record]) -> Answer:
    windows = records[0].windows
    if len(trained(records)) != 1 or len(windows) < 4:
        return Unseen("fewer than four steps of one network were seen")
    if windows[0] < windows[1] == windows[2]:
        sizes = ", ".join(map(str, windows[:4]))
        return Finding(
            f"steps of {sizes}, … micro-batches",
            "count micro-batches from 1, and close the last window where the data end",
            pitfall="accumulation_off_by_one",
        )
    return None


def batchnorm(records: list[Record]) -> Answer:
    compared = 0
    for models in trained(records):
        for step, of_ranks in on_all_ranks(models, "statistics").items():
            found = difference(of_ranks)
            compared += step > 0
            if found and step:
                return Finding(
                    f"{found} in the evaluation after step {step}",
                    "broadcast the buffers of rank 0 before an evaluation, or use SyncBatchNorm",
                    pitfall="batchnorm_statistics",
                )
    return None if compared else Unseen("no BatchNorm was evaluated on several ranks")
