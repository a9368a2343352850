"""The checker of `exact_evaluation`: what each rank returns, and how many samples it has run."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from common.eval_sampler import DistributedEvalSampler
from common.exercises.checker import Checker
from common.exercises.compare import near
from common.exercises.mistake import Mistake
from common.exercises.stage import load_name
from common.exercises.traffic import observed

# On three ranks: a remainder of two, and fewer samples than ranks.
CASES = {"17 samples on {} ranks": {"size": 17}, "2 samples on {} ranks": {"size": 2}}


class CountingNetwork(nn.Module):
    """Classifies by the largest input, and counts the samples that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.seen += len(images)
        return images


def dataset_of(size: int) -> list[tuple[torch.Tensor, int]]:
    """Samples whose right answer is the largest input, but for every third, whose label is wrong."""
    images = torch.eye(4)[torch.arange(size) % 4]
    labels = [index % 4 for index in range(size)]
    for index in range(0, size, 3):
        labels[index] = (index + 1) % 4
    return list(zip(images, labels, strict=True))


def accuracy_of(share: Sequence[int]) -> float:
    """The fraction of right answers for these samples."""
    right = [index for index in share if index % 3 != 0]
    return len(right) / max(len(share), 1)


class Facts(NamedTuple):
    """The accuracy that is returned, and the number of samples that the network was given."""

    accuracy: Any
    seen: Any


def share_of(rank: int, world_size: int, size: int) -> list[int]:
    return list(DistributedEvalSampler(range(size), world_size, rank))


def reference(size: int) -> Facts:
    share = share_of(dist.get_rank(), dist.get_world_size(), size)
    return Facts(accuracy_of(range(size)), len(share))


def attempt(path: str, size: int) -> Facts:
    model = CountingNetwork()
    with observed():
        accuracy = load_name(path, "accuracy")(model, dataset_of(size))
    if not isinstance(accuracy, float):
        accuracy = f"a {type(accuracy).__name__}"
    return Facts(accuracy, model.seen)


def finding(made: Facts, expected: Facts) -> Mistake | None:
    world_size = len(made.seen)
    size = sum(expected.seen)
    one_runs_all = size > world_size and max(made.seen) == size
    if sum(made.seen) != size or one_runs_all:
        return Mistake("not shared out").with_values("samples that were run", made.seen, {"for example": expected.seen})
    if near(made.accuracy, expected.accuracy):
        return None
    accuracies = [accuracy_of(share_of(rank, world_size, size)) for rank in range(world_size)]
    mean_of_means = sum(accuracies) / world_size
    is_mean_of_means = near(made.accuracy, [mean_of_means] * world_size)
    mistake = Mistake("mean of means") if is_mean_of_means else Mistake("other accuracy")
    return mistake.with_values("returned", made.accuracy, {"one device": expected.accuracy[0]})


CHECKER = Checker(reference, attempt, finding, world_sizes=(3, 2), cases=CASES)
