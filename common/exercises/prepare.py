"""The checker of `prepare`: which samples each rank reads, with which weights it begins, and which come out."""

from collections.abc import Iterable
from itertools import zip_longest
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset

from common.exercises.compare import Mistake, by_rank, flat, near
from common.exercises.traffic import Traffic

SAMPLES = 24  # so many that a rank does not by chance have the same ones with and without shuffling
GLOBAL_BATCH_SIZE = 6
Steps = list[list[int]]  # the samples of each step


class Numbers(Dataset):
    """The numbers from 0 on, and which of them were read."""

    def __init__(self) -> None:
        self.read: set[int] = set()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        self.read.add(index)
        return index


def as_batch(numbers: list[int]) -> dict[str, torch.Tensor]:
    """A batch of samples in which each number is the input of one."""
    samples = torch.tensor(numbers)
    inputs = samples[:, None].double() / SAMPLES
    return {"samples": samples, "inputs": inputs, "targets": 3 - inputs**2}


def loader(numbers: Numbers, shuffle: bool) -> DataLoader:
    return DataLoader(numbers, GLOBAL_BATCH_SIZE, collate_fn=as_batch, shuffle=shuffle)


def model_and_optimizer(weight: float) -> tuple[nn.Linear, SGD]:
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, weight)
    return model, SGD(model.parameters(), lr=0.1, momentum=0.5)


def train(batches: Iterable[Any], model: nn.Module, optimizer: SGD) -> Steps:
    """A script's training loop, and the samples of each step."""
    samples = []
    for batch in batches:
        samples.append(batch["samples"].tolist())  # the loader's own collate_fn makes such batches
        F.mse_loss(model(batch["inputs"]), batch["targets"]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return samples


class Result(NamedTuple):
    """The samples and the weight that a rank's prepared objects have read and trained."""

    samples: Steps
    read: list[int]  # the samples that were read from the dataset
    weight: float  # the weight after the last step
    shuffled: Steps  # the samples where the loader shuffles


def reference() -> float:
    model, optimizer = model_and_optimizer(weight=1.0)
    train(loader(Numbers(), shuffle=False), model, optimizer)
    return model.weight.item()


def attempt(solution: ModuleType, _: Traffic) -> Result:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    numbers = Numbers()
    own_model, own_optimizer = model_and_optimizer(weight=1.0 + rank)  # nobody has made them equal
    loaders = loader(numbers, shuffle=False), loader(Numbers(), shuffle=True)
    prepared = solution.prepare(own_model, own_optimizer, *loaders)
    model, optimizer, in_order, shuffled = prepared
    return Result(
        samples=train(in_order, model, optimizer),
        read=sorted(numbers.read),
        weight=own_model.weight.item(),
        shuffled=train(shuffled, model, optimizer),
    )


def check(actual: list[Result], expected: list[float]) -> None:
    check_samples([result.samples for result in actual])
    for rank, result in enumerate(actual):
        if result.read != sorted(flat(result.samples)):
            sentence = f"choose a rank's samples before they are read: these were read, and not all used on rank {rank}"
            raise Mistake(sentence, by_rank([result.read for result in actual]))
    weights = [result.weight for result in actual]
    if not near(weights, expected):
        if near(weights, weights[:1] * len(weights)):
            sentence = "the ranks end with one weight, but not with that of one device: return the optimizer as it is"
        else:
            sentence = "the ranks end with different weights: wrap the given network in DistributedDataParallel"
        raise Mistake(sentence, by_rank(weights) | {"one device": expected[0]})
    check_shuffled([result.shuffled for result in actual])


def joined(ranks: list[Steps]) -> Steps:
    """The samples of each step on all ranks, sorted. Of [[0, 2]] and [[1, 3]] the only step has [0, 1, 2, 3]."""
    steps = zip_longest(*ranks, fillvalue=[])
    return [sorted(flat(shares)) for shares in steps]


def check_samples(ranks: list[Steps]) -> None:
    """Raise a Mistake if the ranks together do not have the batches of the loader that does not shuffle."""
    batches = torch.arange(SAMPLES).view(-1, GLOBAL_BATCH_SIZE).tolist()
    if joined(ranks) == batches:
        return
    sentence = (
        "in each step the ranks together do not have the samples of one batch, in the loader's order: its batch_size "
        "is that of all ranks, and a rank's is batch_size // world size"
    )
    if ranks == ranks[:1] * len(ranks):
        sentence = "every rank has the same samples: a sampler has to deal them out (DistributedSampler does)"
    raise Mistake(sentence, by_rank(ranks) | {"the loader's batches": batches})


def check_shuffled(ranks: list[Steps]) -> None:
    """Raise a Mistake if the ranks do not share out one order of all samples, or if it is the dataset's."""
    order = flat(joined(ranks))
    if sorted(order) != list(range(SAMPLES)):
        raise Mistake(
            "with a loader that shuffles some samples are on two ranks and others on none, because each rank has drawn "
            "an order of its own: draw it from a generator that is seeded alike on all ranks (DistributedSampler does)",
            by_rank(ranks),
        )
    if order == sorted(order):
        sentence = "the loader shuffles, and the prepared one does not: look at whether its sampler is a RandomSampler"
        raise Mistake(sentence, by_rank(ranks))
