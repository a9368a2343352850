"""DDP built before the model is moved: its hooks stay behind.

DDP hooks into the node of the autograd graph that accumulates a parameter's
gradient. A change of device gives the parameter a new node; a change of dtype
does so too, which is how it can be shown on a CPU. The hook stays with the old
one, no error says so, and the ranks train apart. With `device_ids`, DDP at
least refuses a model on the CPU. `prepare` moves and wraps in the right order.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.pitfalls.stage import farthest_apart

LEVELS = ("02_ddp_raw",)
WORLD_SIZE = 2
SYMPTOM = "silent"


def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # Every rank has samples of its own.
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(5):
        inputs = torch.randn(8, 4, dtype=torch.float64, generator=data)
        model(inputs).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def wrong():
    return train(DistributedDataParallel(nn.Linear(4, 1)).to(torch.float64))


def right():
    return train(DistributedDataParallel(nn.Linear(4, 1).to(torch.float64)))


def detect(model):
    if (distance := farthest_apart(model)) > 0:
        return f"not replicas any more: weights differ by up to {distance:.2g}"


def measure(model):
    return f"ranks differ by {farthest_apart(model):.2g}"
