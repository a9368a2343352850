"""Forward through `.module` in training: gradients are never averaged.

DDP prepares its all-reduce in its own forward. `model.module(x)` passes it by,
no error says so, and the loss falls on every rank. Evaluation may use
`.module`: there are no gradients to average.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.pitfalls import gradients


def wrong():
    model = DistributedDataParallel(nn.Linear(4, 1))
    inputs = torch.ones(8, 4) + dist.get_rank()
    model.module(inputs).pow(2).mean().backward()
    return model


def right():
    model = DistributedDataParallel(nn.Linear(4, 1))
    inputs = torch.ones(8, 4) + dist.get_rank()
    model(inputs).pow(2).mean().backward()
    return model


def detect(model):
    """Call it between backward and the optimizer's step."""
    distance = gradients.largest_difference(model)
    if distance > 0:
        return f"the ranks' gradients differ by up to {distance:.2g}"
