"""BatchNorm's statistics differ per rank: each evaluates another network.

Each rank normalises with the mean and variance of its own shard, and its
running statistics follow them. DDP copies rank 0's to all ranks, but only at
the beginning of a forward through the wrapper. After the last one each rank
has its own again. What rank 0 saves is then not what rank 1 evaluates with
`model.module`. Broadcast the buffers before an evaluation. In training,
SyncBatchNorm takes the statistics of the whole batch, on GPUs and with a
message in each layer.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.process_group import all_gather_object


def train():
    model = DistributedDataParallel(nn.BatchNorm1d(1))
    shard = torch.arange(8.0)[:, None] + 10 * dist.get_rank()
    model(shard)  # the running mean is now of this rank's samples
    return model.module.eval()


def wrong():
    return train()


def right():
    model = train()
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    return model


def detect(model):
    """Call it before an evaluation, or before rank 0 saves."""
    state = {name: each.tolist() for name, each in model.named_buffers()}
    first, *others = all_gather_object(state)
    for rank, other in enumerate(others, start=1):
        different = [name for name in first if first[name] != other[name]]
        if different:
            return f"rank {rank} has another {', '.join(different)} than rank 0"
