"""The scheduler stepped on rank 0 only: equal gradients, unequal steps.

`if rank == 0` belongs around what leaves the process: prints, files, trackers.
The optimizer and its learning rate are part of the replica. Gradients stay
averaged, so that the loss looks healthy while the replicas drift apart.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.pitfalls.stage import farthest_apart
from common.process_group import all_gather_object

LEVELS = ("02_ddp_raw",)
WORLD_SIZE = 2
SYMPTOM = "silent"


def train(steps_scheduler):
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    for inputs in torch.randn(5, 8, 4):
        model(inputs).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if steps_scheduler:
            scheduler.step()
    return model, optimizer


def wrong():
    return train(steps_scheduler=dist.get_rank() == 0)


def right():
    return train(steps_scheduler=True)


def detect(outcome):
    _, optimizer = outcome
    rates = all_gather_object([group["lr"] for group in optimizer.param_groups])
    if any(other != rates[0] for other in rates):
        ranks = (f"rank {r} has {rate}" for r, (rate, *_) in enumerate(rates))
        return f"learning rates: {', '.join(ranks)}"


def measure(outcome):
    model, _ = outcome
    return f"ranks differ by {farthest_apart(model):.2g}"
