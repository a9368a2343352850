"""The checker of `exact_evaluation`: what each rank returns, and how many samples it has run."""

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
WORLD_SIZES = (3, 2)
# On three ranks: a remainder of two, and fewer samples than ranks.
CASES = {"17 samples on {}": {"size": 17}, "2 samples on {}": {"size": 2}}


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
    size = sum(result["share"] for result in results)
    one_runs_all = size > world_size and max(seen) == size
    if sum(seen) != size or one_runs_all:
        title = f"share out the {size} samples, so that each is run once and the ranks have about equally many"
        return side_by_side(f"{title}; these were run:", seen, for_example=[result["share"] for result in results])
    if near(returned, [truth] * world_size):
        return None
    title = (
        "this is not the fraction of right answers, as a float on every rank: add up right answers and samples over all"
        " ranks, and divide once"
    )
    if near(returned, [sum(result["of_share"] for result in results) / world_size] * world_size):
        title = (
            "this is the mean of the ranks' accuracies, in which a small share counts as much as a large one: add up"
            " right answers and samples, and divide once"
        )
    return side_by_side(title, returned, one_device=truth)
