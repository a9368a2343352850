"""The checker of `prepare`: which samples each rank reads, with which weights it begins, and which come out."""

from collections.abc import Iterable
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader

from common.exercises.checker import Checker
from common.exercises.compare import flat, near, plain, weights
from common.exercises.mistake import Mistake, SolutionFailed, shown
from common.exercises.stage import load_name

SAMPLES = 24  # so many that a rank does not by chance have the same ones with and without shuffling
BATCH_SIZE = 6  # of all ranks


class Numbers(list[int]):
    """The numbers from 0 on, and which of them were read."""

    def __init__(self) -> None:
        super().__init__(range(SAMPLES))
        self.read: list[int] = []

    def __getitem__(self, index: Any) -> Any:
        self.read.append(index)
        return super().__getitem__(index)


def as_batch(numbers: list[int]) -> dict[str, torch.Tensor]:
    """A batch of samples in which each number is the input of one."""
    samples = torch.tensor(numbers)
    inputs = samples[:, None].double() / SAMPLES
    return {"samples": samples, "inputs": inputs, "targets": 3 - inputs**2}


def loader(shuffle: bool) -> DataLoader:
    numbers: Any = Numbers()
    return DataLoader(numbers, BATCH_SIZE, collate_fn=as_batch, shuffle=shuffle)


def model_and_optimizer(weight: float) -> tuple[nn.Module, SGD]:
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, weight)
    return model, SGD(model.parameters(), lr=0.1)


def samples_in(batch: Any) -> list[int]:
    if isinstance(batch, dict):
        return plain(batch["samples"])
    raise SolutionFailed(Mistake("not collated").at(shown(plain(batch))))


def trained(batches: Iterable[Any], model: nn.Module, optimizer: SGD) -> list:
    """The weights after each step of a script's training loop."""
    found = []
    for batch in batches:
        F.mse_loss(model(batch["inputs"]), batch["targets"]).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(weights(model))
    return found


class Facts(NamedTuple):
    """What this rank's objects do; of the reference, what the objects of one device do.

    Attributes:
        samples: of each step.
        read: the samples that were read from the dataset.
        weights: after each step.
        shuffled: the samples of each step of the loader that shuffles.
    """

    same_optimizer: Any
    samples: list
    read: list
    weights: list
    shuffled: list


def reference() -> Facts:
    batches = list(loader(shuffle=False))
    after = trained(batches, *model_and_optimizer(weight=1.0))
    samples = list(map(samples_in, batches))
    return Facts(True, samples, flat(samples), after, list(map(samples_in, loader(shuffle=True))))


def attempt(path: str) -> Facts:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    numbers: Any = loader(shuffle=False)
    own_model, own_optimizer = model_and_optimizer(weight=1.0 + rank)  # nobody has made them equal
    prepared = load_name(path, "prepare")(numbers, own_model, own_optimizer, loader(shuffle=True))
    own_loader, model, optimizer, shuffled = prepared
    batches = list(own_loader)
    return Facts(
        same_optimizer=optimizer is own_optimizer,
        samples=list(map(samples_in, batches)),
        read=sorted(set(numbers.dataset.read)),
        weights=trained(batches, model, optimizer),
        shuffled=list(map(samples_in, shuffled)),
    )


def finding(made: Facts, expected: Facts) -> Mistake | None:
    """The first mistake: about the optimizer, the samples, the training, the shuffling."""
    if not all(made.same_optimizer):
        return Mistake("another optimizer")
    batches = expected.samples[0]
    if joined(made.samples) != batches:
        mistake = wrong_samples(made.samples)
        return mistake.with_values("the samples of each step", made.samples, {"the loader's batches": batches})
    if made.read != [sorted(flat(of_rank)) for of_rank in made.samples]:
        return Mistake("read in vain").with_values("read", made.read)
    if not near(made.weights, expected.weights):
        return Mistake("no replicas").with_values(
            "the weight after each step", made.weights, {"it should be": expected.weights[0]}
        )
    of_all = flat(joined(made.shuffled))
    if sorted(of_all) != list(range(SAMPLES)):
        return Mistake("own orders").with_values("the samples of each step", made.shuffled)
    if of_all == sorted(of_all):
        return Mistake("not shuffled").with_values("the samples of each step", made.shuffled)
    return None


def wrong_samples(samples: list[list[list[int]]]) -> Mistake:
    if samples == samples[:1] * len(samples):
        return Mistake("same samples")
    if max(map(len, samples[0]), default=0) == BATCH_SIZE:
        return Mistake("whole batch size")
    return Mistake("other batches")


def joined(samples: list[list[list[int]]]) -> list[list[int]]:
    """The samples of each step on all ranks, in the order of the dataset."""
    steps = zip_longest(*samples, fillvalue=[])
    return [sorted(flat(shares)) for shares in steps]


CHECKER = Checker(reference, attempt, finding)
