"""Checks of networks and optimizers: the ranks must be replicas of each other, but draw their own random numbers."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import Tensor

from common.doctor.answers import Answer, Finding, Healthy, Unseen
from common.doctor.record import Draw, Model, Record

TOLERANCE = 1e-6  # of the largest number of a tensor; ranks that average have equal bits on CPUs
GENERATORS = ("torch", "cuda", "numpy", "python")
UNEQUAL_RATES = "Equal gradients and unequal learning rates make unequal steps."
TRAILING_ZEROS = 3  # steps at the end without a learning rate; a schedule may end in one


class Distance(NamedTuple):
    """How far two sets of tensors are from each other."""

    tensors: int
    names: list[str]
    farthest: float

    @property
    def differ(self) -> int:
        return len(self.names)

    def __str__(self) -> str:
        return f"differ in {self.differ} of {self.tensors} tensors by up to {self.farthest:.1e}"


def distance(first: dict[str, Tensor], other: dict[str, Tensor]) -> Distance:
    names = []
    farthest = 0.0
    for name, values in first.items():
        if name not in other or other[name].shape != values.shape or not values.numel():
            continue
        apart = (values - other[name]).abs().max().item()
        if apart > TOLERANCE * values.abs().max().item():
            names.append(name)
            farthest = max(farthest, apart)
    return Distance(len(first), names, farthest)


def trained(records: list[Record]) -> list[list[Model]]:
    """The networks that all ranks have trained: for each the observations of all ranks."""
    of_ranks = [[model for model in record.models if model.forwards] for record in records]
    same = []
    for models in zip(*of_ranks, strict=False):
        kinds = {(model.title, model.parameters) for model in models}
        if len(kinds) == 1:
            same.append(list(models))
    return same


def steps_of_all(models: list[Model], values: str) -> list[int]:
    of_ranks = [getattr(model, values).keys() for model in models]
    return sorted(set(of_ranks[0]).intersection(*of_ranks[1:]) - {0})


def weights(records: list[Record]) -> Answer:
    topic = "weights"
    networks = trained(records)
    if not networks:
        return Unseen(topic, "no network was trained on all ranks")
    if all(models[0].sharded for models in networks):
        return Unseen(topic, "no rank has whole parameters")
    compared = 0
    for models in networks:
        apart: dict[int, tuple[int, Distance]] = {}
        steps = steps_of_all(models, "weights")
        compared += len(steps)
        for step in steps:
            for rank, model in enumerate(models[1:], 1):
                found = distance(models[0].weights[step], model.weights[step])
                if found.differ:
                    apart.setdefault(step, (rank, found))
        # Where only every so manieth step averages the weights, they come together again.
        if apart and all(step in apart for step in steps if step > min(apart)):
            step = min(apart)
            return _replicas_apart(step, *apart[step], models, records)
    if not compared:
        return Unseen(topic, "no optimizer step was seen on all ranks")
    return Healthy(topic, f"equal on all ranks, compared after {compared} optimizer steps")


def _replicas_apart(step: int, rank: int, found: Distance, models: list[Model], records: list[Record]) -> Finding:
    """The finding, with a cause where one was observed."""
    topic = "weights"
    text = f"rank 0 and {rank} {found} after step {step}"
    changed = max((model.changed for model in models), key=len)
    if changed:
        return Finding(
            topic,
            f"{text}: {len(changed)} parameters are not those that DistributedDataParallel wrapped",
            "moved_after_wrapping",
            "move, convert and unfreeze the network first, and wrap it last",
        )
    bypassed = max(models, key=lambda model: model.bypassed)
    if bypassed.bypassed:
        past = f"{bypassed.bypassed} of {bypassed.forwards} forwards in training went past DistributedDataParallel"
        advice = "call the wrapper in training, not its `.module`"
        return Finding(topic, f"{text}: {past}", "forward_through_module", advice)
    if not any(model.wrapped for model in models):
        return Finding(
            topic,
            f"{text}: no DistributedDataParallel holds the network",
            "forward_through_module",
            "wrap the network in DistributedDataParallel, and train the wrapper",
            "DistributedDataParallel averages the gradients of the network that it holds, and it holds none.",
        )
    first = distance(models[0].weights.get(0, {}), models[rank].weights.get(0, {}))
    if first.differ:
        return Finding(
            topic,
            f"rank 0 and {rank} {first} before the first step, though DistributedDataParallel holds the network",
            None,
            "load and initialise weights before wrapping, or on all ranks alike",
            "The replicas began with different weights, and equal gradients keep them apart.",
        )
    rates_apart = _rates_apart(records)
    if rates_apart and rates_apart[0] < step:
        text += f"; the learning rates differ since step {rates_apart[0] + 1}"
        return Finding(topic, text, None, "see the learning rates", UNEQUAL_RATES)
    if records[0].held != records[rank].held:
        text += f"; optimizers hold {records[0].held} parameters on rank 0 and {records[rank].held} on rank {rank}"
        advice = "give the optimizers of all ranks the same parameters"
        return Finding(topic, text, None, advice, "The ranks do not update the same parameters.")
    names = ", ".join(found.names[:3])
    return Finding(topic, text, None, f"compare gradients and updates of these on the ranks, from step 1 on: {names}")


def gradients(records: list[Record]) -> Answer:
    topic = "averages of gradients"
    networks = [models for models in trained(records) if all(model.wrapped for model in models)]
    if not networks or not records[0].steps:
        return Unseen(topic, "no network was trained under DistributedDataParallel on all ranks")
    for models in networks:
        multiplied = min(model.multiplied for model in models)
        if multiplied:
            return Finding(
                topic,
                f"in the first steps {multiplied} gradients that DistributedDataParallel had averaged went into an "
                f"all_reduce of the script, and came back {len(records)} times as large",
                None,
                "leave out the script's all_reduce",
                "DistributedDataParallel averages in backward: a sum over the ranks after it multiplies the average.",
            )
    reduced = sum(models[0].reduced for models in networks)
    if reduced:
        return Healthy(topic, f"in the first steps {reduced} went into an all_reduce of the script: none is multiplied")
    return Healthy(topic, "in the first steps none went into an all_reduce of the script")


def learning_rates(records: list[Record]) -> Answer:
    topic = "learning rates"
    steps = min(len(record.rates) for record in records)
    if not steps:
        return Unseen(topic, "no optimizer step was seen on all ranks")
    apart = _rates_apart(records)
    if not apart:
        return Healthy(topic, f"equal on all ranks at {steps} steps")
    first = apart[0]
    at = [f"rank {record.rank} has {_numbers(record.rates[first])}" for record in records]
    text = f"differ at {len(apart)} of {steps} steps; at step {first + 1} {', '.join(at)}"
    scheduled = [record.scheduled[first] for record in records]
    if len(set(scheduled)) > 1:
        calls = [f"{count} on rank {rank}" for rank, count in enumerate(scheduled)]
        text += f"; the calls of a scheduler's step were {', '.join(calls)}"
        only_on_rank_0 = not any(scheduled[1:])
        why = None if only_on_rank_0 else "The schedulers stepped more often on some ranks than on others."
        return Finding(topic, text, "schedule_on_rank_0", "let all ranks step the scheduler", why)
    advice = "see what sets the learning rate on each rank"
    if first == 0:
        advice = "give the optimizers of all ranks the same learning rate"
    return Finding(topic, text, None, advice, UNEQUAL_RATES)


def _rates_apart(records: list[Record]) -> list[int]:
    apart = []
    for step, rates in enumerate(zip(*(record.rates for record in records), strict=False)):
        if any(rate != rates[0] for rate in rates):
            apart.append(step)
    return apart


def _numbers(rates: list[float]) -> str:
    return " and ".join(f"{rate:.3g}" for rate in dict.fromkeys(rates))


def schedule(records: list[Record]) -> Answer:
    topic = "schedule"
    rates = records[0].rates
    moved = len({tuple(step) for step in rates}) > 1
    if not moved:
        return Unseen(topic, "the learning rate did not change")
    zeros = 0
    while not any(rates[-1 - zeros]):
        zeros += 1
    if zeros >= TRAILING_ZEROS:
        return Finding(
            topic,
            f"the learning rate is 0 in the last {zeros} of {len(rates)} steps",
            "schedule_too_fast",
            "write the schedule for as many calls of its `step` as there are",
        )
    return Healthy(topic, f"has a learning rate until the last of {len(rates)} steps")


def optimizers(records: list[Record]) -> Answer:
    topic = "parameters of the optimizer"
    if not records[0].steps or not trained(records):
        return Unseen(topic, "no optimizer step was seen")
    for record in records:
        if record.forgotten and record.orphans:
            names = ", ".join(record.forgotten[:3])
            return Finding(
                topic,
                f"{record.orphans} are of no network; {len(record.forgotten)} of the network have gradients "
                f"and are in no optimizer ({names})",
                "replaced_parameters",
                "make the optimizer last, from the parameters that are trained",
            )
    return Healthy(topic, f"{records[0].orphans} are of no network")


def random_numbers(records: list[Record]) -> Answer:
    topic = "random numbers"
    seen = 0
    for source, of_ranks in _draws(records):
        for kind in GENERATORS:
            alike, all_drawn = _equal_draws(kind, of_ranks)
            seen += all_drawn
            if alike and alike == all_drawn:
                return Finding(
                    topic,
                    f"{alike} of {all_drawn} {source} drew the same numbers on rank 0 and another one ({kind})",
                    "same_random_numbers",
                    "seed with seed + rank once the network is built",
                )
    if not seen:
        return Unseen(topic, "neither forwards in training nor the reading of batches drew any")
    return Healthy(topic, f"the ranks drew their own at {seen} places")


def _draws(records: list[Record]) -> Iterator[tuple[str, list[list[Draw]]]]:
    for models in trained(records):
        yield "forwards in training", [model.draws for model in models]
    of_passes = []
    for record in records:
        passes = (one for one in record.passes if one.forwards)
        of_passes.append([draw for one in passes for draw in one.draws])
    yield "batches read for training", of_passes


def _equal_draws(kind: str, of_ranks: list[list[Draw]]) -> tuple[int, int]:
    """How often another rank drew what rank 0 drew, and how often both drew."""
    alike = 0
    drawn = 0
    for draws in zip(*of_ranks, strict=False):
        starts = [before[kind] for before, after in draws if kind in before and before[kind] != after[kind]]
        if len(starts) == len(draws):
            drawn += 1
            alike += starts[0] in starts[1:]
    return alike, drawn


def batchnorm(records: list[Record]) -> Answer:
    topic = "BatchNorm's statistics"
    compared = 0
    for models in trained(records):
        for step in steps_of_all(models, "statistics"):
            for rank, model in enumerate(models[1:], 1):
                found = distance(models[0].statistics[step], model.statistics[step])
                compared += found.tensors > 0
                if found.differ:
                    return Finding(
                        topic,
                        f"rank 0 and {rank} {found} in the evaluation after step {step}",
                        "batchnorm_statistics",
                        "broadcast the buffers of rank 0 before an evaluation, or use SyncBatchNorm",
                    )
    if not compared:
        return Unseen(topic, "no BatchNorm was evaluated on several ranks")
    return Healthy(topic, f"equal in {compared} evaluations")


def accumulation(records: list[Record]) -> Answer:
    topic = "accumulation"
    windows = records[0].windows
    if len(trained(records)) != 1 or len(windows) < 4:
        return Unseen(topic, "fewer than four steps of one network were seen")
    first, second, third, *_ = windows
    if first < second == third:
        sizes = ", ".join(map(str, windows[:4]))
        return Finding(
            topic,
            f"steps of {sizes}, … micro-batches",
            "accumulation_off_by_one",
            "count micro-batches from 1, and close the last window where the data end",
        )
    return Healthy(topic, f"{_most(windows)} forward(s) in each step")


def _most(numbers: Iterable[int]) -> int:
    numbers = list(numbers)
    return max(set(numbers), key=numbers.count)
