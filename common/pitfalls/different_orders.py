"""Every rank shuffles with its own seed: samples come twice, or never.

The ranks deal one order out among them, each taking every W-th sample. That
works if all draw the same order. With `seed + rank`, which is right for
dropout, each deals from an order of its own, and no error says so.
"""

import torch.distributed as dist
from torch.utils.data import DistributedSampler

from common.process_group import all_gather_object

TRAIN_SET = range(1_000)


def wrong():
    return DistributedSampler(TRAIN_SET, seed=42 + dist.get_rank())


def right():
    return DistributedSampler(TRAIN_SET, seed=42)


def detect(sampler):
    visited = set().union(*all_gather_object(list(sampler)))
    missing = len(sampler.dataset) - len(visited)
    if missing >= dist.get_world_size():  # a tail that is dropped has fewer
        return f"{missing} samples are in the shard of no rank"
