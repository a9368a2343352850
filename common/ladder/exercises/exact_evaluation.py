"""Evaluate exactly on any number of ranks.

You have a network and a list of (image, label) samples on every rank, the same on all. Write

    def accuracy(model, dataset) -> float: ...

It returns the fraction of samples that `model(images).argmax(dim=1)` classifies right, on every rank the same number.
Each rank runs the network on its share of the samples only. No sample is counted twice, and none is left out, whether
or not their number divides by the number of ranks. There may be fewer samples than ranks.
"""

from pathlib import Path

import torch
from torch import nn

from common.ladder.exercises.stage import SolutionFailed, function_in, on_ranks, process_group

SIZES = (100, 17, 3)  # on seven ranks: a remainder of two, one of three, and fewer samples than ranks


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
    labels = [(index + (index % 3 == 0)) % 4 for index in range(size)]
    return list(zip(images, labels, strict=True))


def true_accuracy(size: int) -> float:
    right = sum(index % 3 != 0 for index in range(size))
    return right / size


def run(path: str) -> list[dict]:
    """On one rank: for each size the accuracy, and how many samples its network saw."""
    solution = function_in(path, "accuracy")
    outcomes = []
    with process_group():
        for size in SIZES:
            model = CountingNetwork()
            value = float(solution(model, dataset_of(size)))
            outcomes.append({"accuracy": value, "seen": model.seen})
    return outcomes


def check(path: Path) -> list[str]:
    """On seven ranks and on one."""
    for world_size in (7, 1):
        try:
            results = on_ranks(world_size, run, path)
        except SolutionFailed as failure:
            return [str(failure)]
        for number, size in enumerate(SIZES):
            found = findings([of_rank[number] for of_rank in results], size)
            if found:
                return [f"{size} samples on {world_size} ranks: {finding}" for finding in found]
    return []


def findings(results: list[dict], size: int) -> list[str]:
    found = []
    values = {result["accuracy"] for result in results}
    seen = sum(result["seen"] for result in results)
    if len(values) > 1:
        found.append("the ranks return different numbers: add up counts over all ranks")
    elif abs(values.pop() - true_accuracy(size)) > 1e-6:
        found.append(f"the accuracy is {results[0]['accuracy']:.4f}, not {true_accuracy(size):.4f}")
    if seen > size:
        found.append(f"the ranks together ran {seen} samples: some were evaluated twice")
    if seen < size:
        found.append(f"the ranks together ran {seen} samples: some were left out")
    return found
