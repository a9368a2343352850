"""Every rank writes the checkpoint: the slowest one's is what remains.

The weights are equal on all ranks, so the file often looks right. Other state
belongs to one rank: the generator, the position in the data, and what the last
forward has done to BatchNorm's running statistics. And whoever reads too early
finds half of the file, no file or an old one. Let one rank write, under another
name until the file is complete. All ranks wait at a barrier before they read.
It stands outside of `if rank == 0`, because every rank has to call it.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.process_group import all_gather_object


def train():
    model = DistributedDataParallel(nn.BatchNorm1d(4))
    model(torch.full((8, 4), float(dist.get_rank())))  # its own running mean
    return model.module


def wrong(folder):
    model = train()
    path = folder / "checkpoint.pt"
    for turn in range(dist.get_world_size()):  # ranks are never equally fast
        if dist.get_rank() == turn:
            torch.save(model.state_dict(), path)
        dist.barrier()
    return model, path


def right(folder):
    model = train()
    path = folder / "checkpoint.pt"
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), f"{path}.tmp")
        os.replace(f"{path}.tmp", path)
    dist.barrier()
    return model, path


def detect(outcome, _):
    model, path = outcome
    saved = torch.load(path, weights_only=True)["running_mean"]
    means = all_gather_object(model.running_mean)
    if not torch.equal(means[0], saved):
        return "the file does not hold rank 0's state: another rank wrote later"
