"""The scheduler stepped on rank 0 only: equal gradients, unequal steps.

`if rank == 0` belongs around what leaves the process: prints, files, trackers.
The optimizer and its learning rate are part of the replica. Gradients stay
averaged, so that the loss looks healthy while the replicas drift apart.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

from common.process_group import all_gather_object


def wrong():
    optimizer = torch.optim.SGD(nn.Linear(4, 1).parameters(), lr=0.08)
    scheduler = ExponentialLR(optimizer, gamma=0.5)
    for _ in range(3):
        optimizer.step()
        if dist.get_rank() == 0:
            scheduler.step()
    return optimizer


def right():
    optimizer = torch.optim.SGD(nn.Linear(4, 1).parameters(), lr=0.08)
    scheduler = ExponentialLR(optimizer, gamma=0.5)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    return optimizer


def detect(optimizer):
    own = [group["lr"] for group in optimizer.param_groups]
    rates = all_gather_object(own)
    if any(other != rates[0] for other in rates):
        ranks = (f"rank {r} has {rate}" for r, (rate, *_) in enumerate(rates))
        return f"learning rates: {', '.join(ranks)}"
