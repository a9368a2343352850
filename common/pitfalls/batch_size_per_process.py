"""Batch size per process taken for global: steps grow with the processes.

A loader in each process loads its own batch. Given the global batch size, W
processes take steps of W times as many samples, and an epoch has 1/W of the
steps; the learning rate that fitted no longer does.
"""

import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from common.process_group import all_gather_object

TRAIN_SET = range(6_400)
BATCH_SIZE = 64  # samples per optimizer step


def wrong():
    sampler = DistributedSampler(TRAIN_SET)
    return DataLoader(TRAIN_SET, BATCH_SIZE, sampler=sampler)


def right():
    sampler = DistributedSampler(TRAIN_SET)
    per_process = BATCH_SIZE // dist.get_world_size()
    return DataLoader(TRAIN_SET, per_process, sampler=sampler)


def detect(loader):
    samples = sum(all_gather_object(loader.batch_size))
    if samples != BATCH_SIZE:
        return f"a step takes {samples} samples, not {BATCH_SIZE}"
