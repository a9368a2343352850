"""Metrics not gathered: rank 0's shard is taken for the whole test set.

Every rank has seen one part of the samples. Numbers that should be global must
be equal on all ranks; if each rank has one of its own, nobody has the whole.
Sum what can be summed (correct, total), then divide.
"""

import torch
import torch.distributed as dist

from common.process_group import all_gather_object


def count_correct():
    """[correct, total] of a threshold on this rank's share of 401 points."""
    data = torch.Generator().manual_seed(1)
    points, noise = torch.randn(2, 401, generator=data)
    correct = (points + noise > 0) == (points > 0)
    shard = correct[dist.get_rank() :: dist.get_world_size()]
    return torch.tensor([shard.sum(), len(shard)])


def wrong():
    correct, total = count_correct()
    return correct / total


def right():
    counts = count_correct()
    dist.all_reduce(counts)
    correct, total = counts
    return correct / total


def detect(accuracy):
    """It finds nothing where the shards have equal accuracies by chance."""
    accuracies = all_gather_object(accuracy.item())
    if len(set(accuracies)) > 1:
        ranks = (f"rank {r} has {a:.1%}" for r, a in enumerate(accuracies))
        return f"not the accuracy of the whole: {', '.join(ranks)}"
