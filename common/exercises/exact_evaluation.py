"""The checker of `exact_evaluation`: what seven ranks return, and how many samples each of them has run."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from common.accelerator.sampler import DistributedEvalSampler
from common.exercises.compare import is_number, near, plain, side_by_side
from common.exercises.handles import all_waited_for
from common.exercises.stage import Place, in_rounds, load_name, number_of_ranks, on_ranks

MINUTES = 15
READ = "02_ddp_raw/README.md"
SAME_AS = "one device, and DistributedEvalSampler (common/accelerator/sampler.py)"
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
    labels = [index % 4 for index in range(size)]
    for index in range(0, size, 3):
        labels[index] = (index + 1) % 4
    return list(zip(images, labels, strict=True))


def true_accuracy(size: int) -> float:
    wrong = len(range(0, size, 3))
    return 1 - wrong / size


def share_of(size: int, world_size: int, rank: int) -> list[int]:
    return list(DistributedEvalSampler(range(size), world_size, rank))


def mean_of_accuracies(size: int, world_size: int) -> float:
    """The number that comes out where each rank's own accuracy is averaged."""
    own = []
    for rank in range(world_size):
        share = share_of(size, world_size, rank)
        right = [index for index in share if index % 3 != 0]
        own.append(len(right) / max(len(share), 1))
    return sum(own) / world_size


def run(path: str, size: int) -> dict:
    """On one rank: what is returned for a dataset of `size`, and how many samples the network saw."""
    accuracy = load_name(path, "accuracy")
    model = CountingNetwork()
    try:
        with all_waited_for():
            returned = accuracy(model, dataset_of(size))
    except Exception as error:
        error.add_note(f"with {situation(size, dist.get_world_size())}")
        raise
    if isinstance(returned, torch.Tensor):
        return {"returned": "a Tensor, of which .item() makes a number", "seen": model.seen}
    return {"returned": plain(returned), "seen": model.seen}


def situation(size: int, world_size: int) -> str:
    text = f"{size} samples on {number_of_ranks(world_size)}"
    return f"{text}, so that some ranks have none" if size < world_size else text


def check(path: Path) -> list[str]:
    """On seven ranks and on one."""

    def on(world_size: int) -> list[str]:
        for size in SIZES:
            results = on_ranks(world_size, partial(run, size=size), path, partial(why_it_hangs, size))
            found = finding(results, size)
            if found:
                return [f"{size} samples on {number_of_ranks(world_size)}: {found}"]
        return []

    return in_rounds((7, 1), on)


def why_it_hangs(size: int, places: Sequence[Place | None]) -> str | None:
    if None in places:
        return (
            f"with {situation(size, len(places))}, a rank has returned, and does not answer: all ranks must call the"
            " same collectives, equally often, however many samples each has"
        )
    return None


def finding(results: Sequence[dict], size: int) -> str | None:
    world_size = len(results)
    truth = true_accuracy(size)
    returned = [result["returned"] for result in results]
    seen = [result["seen"] for result in results]
    shares = [len(share_of(size, world_size, rank)) for rank in range(world_size)]
    samples = f"\n    samples by rank: {seen}\n    for example: {shares}"
    if not all(is_number(value) for value in returned):
        return side_by_side("accuracy returns a number on every rank; these are what came:", returned)
    if sum(seen) > size:
        return f"the ranks together ran {sum(seen)} samples: some were evaluated twice{samples}"
    if sum(seen) < size:
        return f"the ranks together ran {sum(seen)} samples: some were left out{samples}"
    if size > 2 * world_size > 2 and max(seen) > size / 2:
        return f"rank {seen.index(max(seen))} runs most samples, and the others wait for it: share them out{samples}"
    if near(returned, [truth] * world_size):
        return None
    title = "this is not the fraction of right answers, which is their sum divided by the sum of samples"
    if not all(near(value, returned[0]) for value in returned):
        title = "the ranks return different numbers: add up the counts over all ranks, before you divide"
        if near(returned[0], truth):
            title = (
                "rank 0 has the right number, and other ranks have not: reduce gives the sum to one rank, and"
                " all_reduce gives it to all"
            )
    elif near(returned[0], mean_of_accuracies(size, world_size)):
        title = (
            "this is the mean of the ranks' accuracies, in which a small share counts as much as a large one: add up"
            " right answers and samples, and divide once"
        )
    return side_by_side(title, returned, one_device=truth)
