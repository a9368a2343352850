"""The checker of `exact_evaluation`: what each rank returns, and how many samples it has run."""

from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from common.eval_sampler import DistributedEvalSampler
from common.exercises.compare import near
from common.exercises.mistake import Mistake, by_rank
from common.exercises.traffic import Traffic

SIZES = (17, 2)  # on three ranks: a remainder of two, and fewer samples than ranks


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


class Evaluation(NamedTuple):
    """The accuracy that the solution returned, and the number of samples that the network was given."""

    accuracy: Any
    seen: int


def reference() -> list[list[int]]:
    """An exact share of the samples of each size."""
    return [list(DistributedEvalSampler(range(size))) for size in SIZES]


def attempt(solution: ModuleType, _: Traffic) -> list[Evaluation]:
    evaluations = []
    for size in SIZES:
        model = CountingNetwork()
        accuracy = solution.accuracy(model, dataset_of(size))
        if not isinstance(accuracy, float):
            accuracy = f"a {type(accuracy).__name__}"
        evaluations.append(Evaluation(accuracy, model.seen))
    return evaluations


def check(made: list[list[Evaluation]], expected: list[list[list[int]]]) -> None:
    for number, size in enumerate(SIZES):
        check_size(size, [of_rank[number] for of_rank in made], [of_rank[number] for of_rank in expected])


def check_size(size: int, made: list[Evaluation], shares: list[list[int]]) -> None:
    world_size = len(made)
    seen = [of_rank.seen for of_rank in made]
    one_runs_all = size > world_size and max(seen) == size
    if sum(seen) != size or one_runs_all:
        raise Mistake(
            f"{size} samples: share them out, so that each is run once and the ranks have about equally many, as "
            "DistributedEvalSampler does in common/eval_sampler.py",
            by_rank(seen) | {"for example": list(map(len, shares))},
        )
    accuracies = [of_rank.accuracy for of_rank in made]
    right = accuracy_of(range(size))
    if near(accuracies, [right] * world_size):
        return
    mean_of_means = sum(map(accuracy_of, shares)) / world_size
    if near(accuracies, [mean_of_means] * world_size):
        sentence = (
            "this is the mean of the ranks' accuracies, in which a small share counts as much as a large one: add up "
            "right answers and samples, and divide once"
        )
    else:
        sentence = (
            "this is not the fraction of right answers, as a float on every rank: add up right answers and samples "
            "over all ranks, and divide once"
        )
    raise Mistake(f"{size} samples: {sentence}", by_rank(accuracies) | {"one device": right})
