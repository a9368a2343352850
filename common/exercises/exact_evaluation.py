"""The checker of `exact_evaluation`: what seven ranks return, and how many samples each of them has run."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from common.accelerator.sampler import DistributedEvalSampler
from common.exercises.compare import near, side_by_side
from common.exercises.stage import load_name
from common.exercises.traffic import observed

MINUTES = 15
READ = "02_ddp_raw/README.md"
SAME_AS = "one device, and DistributedEvalSampler (common/accelerator/sampler.py)"
WORLD_SIZES = (7, 1)
WHY_IT_HANGS = (
    "all ranks must call the same collectives, equally often, however many samples each has: with fewer samples than"
    " ranks some have none"
)
# On seven ranks: a remainder of two, one of three, and fewer samples than ranks.
CASES = {"100 samples on {}": {"size": 100}, "17 samples on {}": {"size": 17}, "3 samples on {}": {"size": 3}}


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


def run(path: str, size: int) -> dict:
    """On one rank: what is returned for a dataset of `size`, how many samples the network saw, and what is right."""
    accuracy = load_name(path, "accuracy")
    model = CountingNetwork()
    with observed():
        returned = accuracy(model, dataset_of(size))
    share = list(DistributedEvalSampler(range(size), dist.get_world_size(), dist.get_rank()))
    return {
        "returned": returned if isinstance(returned, float) else f"a {type(returned).__name__}",
        "seen": model.seen,
        "share": len(share),
        "of_share": accuracy_of(share),
        "truth": accuracy_of(range(size)),
    }


def finding(results: list[dict]) -> str | None:
    world_size = len(results)
    truth = results[0]["truth"]
    returned = [result["returned"] for result in results]
    seen = [result["seen"] for result in results]
    shares = [result["share"] for result in results]
    size = sum(shares)
    samples = f"\n    samples by rank: {seen}\n    for example: {shares}"
    if not all(isinstance(value, float) for value in returned):
        return side_by_side("accuracy returns a float on every rank; these are what came:", returned)
    if sum(seen) != size:
        what = "evaluated twice" if sum(seen) > size else "left out"
        return f"the ranks together ran {sum(seen)} samples: some were {what}{samples}"
    if size > 2 * world_size > 2 and max(seen) > size / 2:
        return f"rank {seen.index(max(seen))} runs most samples, and the others wait for it: share them out{samples}"
    if near(returned, [truth] * world_size):
        return None
    title = "this is not the fraction of right answers, which is their sum divided by the sum of samples"
    if not near(returned, returned[:1] * world_size):
        title = "the ranks return different numbers: add up the counts over all ranks, before you divide"
        if near(returned[0], truth):
            title = (
                "rank 0 has the right number, and other ranks have not: reduce gives the sum to one rank, and"
                " all_reduce gives it to all"
            )
    elif near(returned[0], sum(result["of_share"] for result in results) / world_size):
        title = (
            "this is the mean of the ranks' accuracies, in which a small share counts as much as a large one: add up"
            " right answers and samples, and divide once"
        )
    return side_by_side(title, returned, one_device=truth)
