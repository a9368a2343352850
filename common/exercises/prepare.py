"""The checker of `prepare`: which samples each rank reads, with which weights it begins, and which come out."""

from collections.abc import Iterable, Sequence
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from common.exercises.compare import agreed, flat, near, plain, shown, side_by_side
from common.exercises.stage import SolutionFailed, in_rounds, load_name, on_ranks
from common.small.accelerator import Accelerator, DataLoaderConfiguration, InitProcessGroupKwargs

MINUTES = 25
READ = "03_accelerate/README.md"
SAME_AS = "the small Accelerator (common/small/accelerator.py), level 02's DDP and sampler, and one device"
WORLD_SIZES = (2, 3)
SAMPLES = 18
BATCH_SIZE = 6  # of all ranks
# Of the loader that shuffles: so many that a rank does not by chance have the same ones as without shuffling.
SHUFFLED_SAMPLES = 24
LEARNING_RATE = 0.1
FIRST_WEIGHTS = (1.0, 2.0, 3.0)  # by rank, where nobody makes them equal


class Numbers(Dataset):
    """The numbers from 0 on, and which of them were read."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        if index >= self.size:
            raise IndexError(f"there are {self.size} numbers")  # here a loop over the dataset ends
        self.read.append(index)
        return index


def as_batch(numbers: list[int]) -> dict[str, torch.Tensor]:
    """A batch of samples in which each number is the input of one."""
    samples = torch.tensor(numbers)
    inputs = samples[:, None].double() / SAMPLES
    return {"samples": samples, "inputs": inputs, "targets": 3 - inputs**2}


def network(rank: int) -> nn.Linear:
    """One weight, so that it can be read."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, FIRST_WEIGHTS[rank])
    return model


class Objects(NamedTuple):
    """What a script hands to `prepare`, and gets back, in this order."""

    loader: Any
    model: Any
    optimizer: Any
    shuffled: Any


def objects_of(rank: int) -> Objects:
    torch.manual_seed(rank)
    model = network(rank)
    optimizer = SGD(model.parameters(), lr=LEARNING_RATE)
    loader = DataLoader(Numbers(SAMPLES), BATCH_SIZE, collate_fn=as_batch)
    shuffled = DataLoader(Numbers(SHUFFLED_SAMPLES), BATCH_SIZE, collate_fn=as_batch, shuffle=True)
    return Objects(loader, model, optimizer, shuffled)


def weights_of(model: nn.Module) -> list[float]:
    [weight] = model.parameters()
    return plain(weight.flatten())


def samples_in(batch: Any) -> list[int]:
    if isinstance(batch, dict):
        return plain(batch["samples"])
    raise SolutionFailed(
        f"a batch is {plain(batch)}, and not what the loader's own collate_fn makes of the samples: hand `collate_fn`"
        " on to the new loader, and share out the numbers of the samples, by a sampler, before they become a batch"
    )


def trained(batches: Iterable[Any], model: Any, optimizer: Any) -> list:
    """The weights after each step of a script's training loop."""
    weights = []
    for batch in batches:
        F.mse_loss(model(batch["inputs"]), batch["targets"]).backward()
        optimizer.step()
        optimizer.zero_grad()
        weights.append(weights_of(model))
    return weights


def prepared_by_the_small_one() -> Objects:
    config = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True, data_seed=0)
    group = InitProcessGroupKwargs(timedelta(seconds=60))
    with mock.patch.object(dist, "init_process_group"):  # this rank is in a group already
        accelerator = Accelerator(True, config, [group])
    prepared = accelerator.prepare(*objects_of(dist.get_rank()))
    return Objects(*prepared)


def prepared_as_in_level_02() -> Objects:
    objects = objects_of(dist.get_rank())
    dataset = objects.loader.dataset
    sampler: DistributedSampler = DistributedSampler(dataset, shuffle=False)
    loader = DataLoader(dataset, BATCH_SIZE // dist.get_world_size(), sampler=sampler, collate_fn=as_batch)
    return objects._replace(model=DistributedDataParallel(objects.model), loader=loader)


def run(path: str) -> dict:
    """On one rank: what the prepared objects are and do, and the weights that are right."""
    rank = dist.get_rank()
    small = trained(*prepared_by_the_small_one()[:3])
    real = trained(*prepared_as_in_level_02()[:3])
    one_device = trained(*objects_of(rank=0)[:3])
    objects = objects_of(rank)
    prepare = load_name(path, "prepare")
    prepared = prepare(*objects)
    refuse_other_kinds(prepared, objects)
    batches = list(prepared[0])
    batches_of_shuffled = list(prepared[3])
    samples = list(map(samples_in, batches))
    model, optimizer = prepared[1:3]
    first = weights_of(model)
    of_optimizer = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return {
        "kind": type(model).__name__,
        "first": first,
        "weights": trained(batches, model, optimizer) if equally_many(batches) else [],
        "expected": agreed(small=small, real=real, one_device=one_device),
        "same_optimizer": optimizer is objects.optimizer,
        "learning_rate": optimizer.param_groups[0]["lr"],
        "same_parameters": of_optimizer == {id(parameter) for parameter in model.parameters()},
        "samples": samples,
        "shuffled": list(map(samples_in, batches_of_shuffled)),
        "read": sorted(set(objects.loader.dataset.read)),
    }


def equally_many(batches: list) -> bool:
    """True on all ranks if they have equally many batches. A rank with more would wait in backward for ever."""
    counts: list = [None] * dist.get_world_size()
    dist.all_gather_object(counts, len(batches))
    return len(set(counts)) == 1


def refuse_other_kinds(prepared: Any, objects: Sequence[Any]) -> None:
    """Raise SolutionFailed if what `prepare` has returned is not of the kinds of what it was given."""
    given = ", ".join(type(obj).__name__ for obj in objects)
    if not isinstance(prepared, list):
        returned = "None" if prepared is None else type(prepared).__name__
        raise SolutionFailed(f"prepare was given {given}; it returned {returned}, and not a list")
    returned = ", ".join(type(obj).__name__ for obj in prepared) or "nothing"
    title = f"prepare was given {given}; it returned {returned}"
    if len(prepared) != len(objects):
        raise SolutionFailed(f"{title}: as many objects belong into the list as it was given")
    for before, after in zip(objects, prepared, strict=True):
        base = next(base for base in (nn.Module, Optimizer, Iterable) if isinstance(before, base))
        if not isinstance(after, base):
            raise SolutionFailed(f"{title}: each object belongs to the place in which it came")


def check(path: Path) -> list[str]:
    """An epoch of three steps, and one with a loader that shuffles, on two and on three ranks."""

    def on(world_size: int) -> list[str | None]:
        results = on_ranks(world_size, run, path)
        found = [wrong_network(results), wrong_optimizer(results), wrong_samples(results)]
        if any(found):
            return found
        return [wrong_weights(results), wrong_shuffle(results)]

    return in_rounds(WORLD_SIZES, on)


def wrong_network(results: list[dict]) -> str | None:
    """A finding about the weights with which the ranks begin."""
    first = [result["first"] for result in results]
    if near(first, [[FIRST_WEIGHTS[0]]] * len(results)):
        return None
    title = "the network that came back does not have the weights of rank 0 on all ranks"
    if near(first, [[weight] for weight in FIRST_WEIGHTS[: len(results)]]):
        title = "each rank begins with weights of its own: DistributedDataParallel gives all ranks those of rank 0"
    return side_by_side(f"{title}; the weight before the first step:", first, it_should_be=list(FIRST_WEIGHTS[:1]))


def wrong_optimizer(results: list[dict]) -> str | None:
    """A finding about what the optimizer moves, and how far."""
    if not all(result["same_parameters"] for result in results):
        title = (
            "the optimizer does not hold the parameters of the network that came back, so its steps do not move them:"
            " wrap the very network that was given, and no copy, and return the very optimizer"
        )
        return side_by_side(f"{title}; the weight after each step:", [result["weights"] for result in results])
    rates = [result["learning_rate"] for result in results]
    if not all(result["same_optimizer"] for result in results):
        title = (
            "the optimizer that came back is another one than was given, without its settings and its state. It needs"
            " no change, so return the very object: equal weights and equal averaged gradients make equal steps on all"
            " ranks"
        )
        if near(rates, [LEARNING_RATE] * len(results)):
            return title
        return side_by_side(f"{title}; the learning rate:", rates, it_was=LEARNING_RATE)
    return None


def wrong_samples(results: list[dict]) -> str | None:
    """A finding about the samples of each step of the loader that does not shuffle."""
    samples = [result["samples"] for result in results]
    batches = [list(range(start, start + BATCH_SIZE)) for start in range(0, SAMPLES, BATCH_SIZE)]
    if joined(samples) == batches:
        if all(result["read"] == sorted(flat(result["samples"])) for result in results):
            return None
        title = (
            "each rank has the samples of its share, but it has read others from the dataset too, and thrown them away:"
            " choose the numbers of the samples before they are read"
        )
        return side_by_side(f"{title}; the samples read by", [result["read"] for result in results])
    return side_by_side(
        f"{wrong_shares(samples, batches)}; the samples of each step of",
        samples,
        batches_of_the_original_loader=batches,
    )


def wrong_shares(samples: list, batches: list) -> str:
    """The mistake by which the ranks together do not have the batches of the original loader."""
    steps = joined(samples)
    if all(of_rank == batches for of_rank in samples):
        return (
            "every rank has all samples of a batch, so all compute the same, and two devices are no faster than one:"
            " a rank's share of a batch is batch_size // world size samples"
        )
    counts = list(map(len, samples))
    if len(set(counts)) > 1:
        return (
            "a rank had fewer batches than another one, which waits for it in backward for ever: share out each batch,"
            f" so that all ranks take part in every step; these ranks have {shown(counts)} batches"
        )
    shares = [sorted(flat(of_rank)) for of_rank in samples]
    if shares == [list(range(SAMPLES))] * len(samples):
        return "every rank goes through all samples: a sampler has to deal them out (DistributedSampler does)"
    if shares == shares[:1] * len(shares):
        return "all ranks have the same samples: the share of each begins with its own number, dist.get_rank()"
    if len(steps[0]) > BATCH_SIZE:
        return (
            f"a step takes {len(steps[0])} samples, and an epoch has fewer steps: the loader's batch_size,"
            f" {BATCH_SIZE}, is that of all ranks, so that of one rank is batch_size // world size"
        )
    return (
        "each sample is on one rank, but in each step the ranks together do not have the samples of one batch: keep the"
        " loader's order where it does not shuffle (DistributedSampler does, unless it is told shuffle=False), and"
        " share out each batch"
    )


def wrong_weights(results: list[dict]) -> str | None:
    weights = [result["weights"] for result in results]
    expected = results[0]["expected"]
    if near(weights, [expected] * len(results)):
        return None
    title = "the weights are not those of one device"
    if not near(weights, weights[:1] * len(results)):
        title = "the ranks drift apart, because each steps with the gradients of its own samples: DDP averages them"
        kinds = {result["kind"] for result in results}
        if kinds != {DistributedDataParallel.__name__}:
            title = f"{title}, and what came back is a {' or '.join(sorted(kinds))}"
    return side_by_side(f"{title}; the weight after each step:", weights, it_should_be=expected)


def wrong_shuffle(results: list[dict]) -> str | None:
    """A finding about the samples of the loader that shuffles."""
    samples = [result["shuffled"] for result in results]
    of_all = flat(joined(samples))
    numbers = range(SHUFFLED_SAMPLES)
    if sorted(of_all) != list(numbers):
        title = (
            "with a loader that shuffles some samples are on two ranks and others on none, because each rank has drawn"
            " an order of its own: draw it from a generator that is seeded alike on all ranks (DistributedSampler does)"
        )
    elif of_all == list(numbers):
        title = "the loader shuffles, and the prepared one does not: look at whether its sampler is a RandomSampler"
    else:
        return None
    return side_by_side(f"{title}; the samples of each step of", samples)


def joined(samples: list[list[list[int]]]) -> list[list[int]]:
    """The samples of each step on all ranks, in the order of the dataset."""
    steps = zip_longest(*samples, fillvalue=[])
    return [sorted(flat(shares)) for shares in steps]
