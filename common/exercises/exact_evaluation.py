"""The checker of `exact_evaluation`: what each rank returns, and how many samples it has run."""

from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from common.exercises.compare import Mistake, as_numbers, by_rank, near
from common.exercises.traffic import Traffic

SIZES = (17, 2)  # on three ranks 17 samples leave a remainder, and 2 are fewer samples than ranks


class CountingNetwork(nn.Module):
    """Classifies by the largest input, and counts the samples that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def forward(self, images: Tensor) -> Tensor:
        self.seen += len(images)
        return images


def dataset_of(size: int) -> list[tuple[Tensor, int]]:
    """Samples whose right answer is the largest input, but for every third, whose label is wrong."""
    images = torch.eye(4)[torch.arange(size) % 4]
    labels = [index % 4 for index in range(size)]
    for index in range(0, size, 3):
        labels[index] = (index + 1) % 4
    return list(zip(images, labels, strict=True))


class Evaluation(NamedTuple):
    """The accuracy that is returned, and the number of samples that the network was given."""

    accuracy: Any
    seen: int


def reference() -> list[Evaluation]:
    evaluations = []
    for size in SIZES:
        images, labels = zip(*dataset_of(size), strict=True)
        right = torch.stack(images).argmax(dim=1) == torch.tensor(labels)
        evaluations.append(Evaluation(right.double().mean().item(), size))
    return evaluations


def attempt(solution: ModuleType, _: Traffic) -> list[Evaluation]:
    evaluations = []
    for size in SIZES:
        model = CountingNetwork()
        accuracy = solution.accuracy(model, dataset_of(size))
        evaluations.append(Evaluation(as_numbers(accuracy), model.seen))
    return evaluations


def check(actual: list[list[Evaluation]], expected: list[list[Evaluation]]) -> None:
    world_size = len(actual)
    for number, size in enumerate(SIZES):
        seen = [evaluations[number].seen for evaluations in actual]
        most = size // world_size + world_size - 1  # one rank may have the whole remainder
        if sum(seen) != size or max(seen) > most:
            raise Mistake(
                f"{size} samples: share them out, so that each is run once and the ranks have about equally many, as "
                "DistributedEvalSampler does in common/eval_sampler.py. Samples that were run:",
                by_rank(seen),
            )
        accuracies = [evaluations[number].accuracy for evaluations in actual]
        right = expected[0][number].accuracy
        if not near(accuracies, [right] * world_size):
            raise Mistake(
                f"{size} samples: this is not the fraction of right answers. Add up right answers and samples over all "
                "ranks, and divide once: in a mean of the ranks' accuracies a small share counts like a large one",
                by_rank(accuracies) | {"one device": right},
            )
