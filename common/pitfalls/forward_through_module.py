"""Forward through `.module` in training: gradients are never averaged.

DDP prepares its all-reduce in its own forward. `model.module(x)` passes it by,
no error says so, and the loss falls on every rank. Evaluation may use
`.module`: there are no gradients to average.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.pitfalls.stage import farthest_apart

LEVELS = ("02_ddp_raw",)
WORLD_SIZE = 2
SYMPTOM = "silent"


def train(forward, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # Every rank has samples of its own.
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(5):
        inputs = torch.randn(8, 4, generator=data)
        forward(inputs).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def wrong():
    model = DistributedDataParallel(nn.Linear(4, 1))
    train(model.module, model)
    return model


def right():
    model = DistributedDataParallel(nn.Linear(4, 1))
    train(model, model)
    return model


def detect(model):
    if (distance := farthest_apart(model)) > 0:
        return f"not replicas any more: weights differ by up to {distance:.2g}"


def measure(model):
    return f"ranks differ by {farthest_apart(model):.2g}"
