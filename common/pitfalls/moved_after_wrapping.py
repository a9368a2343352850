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

from common.pitfalls import gradients


def wrong():
    model = DistributedDataParallel(nn.Linear(4, 1)).to(torch.float64)
    inputs = torch.ones(8, 4, dtype=torch.float64) + dist.get_rank()
    model(inputs).pow(2).mean().backward()
    return model


def right():
    model = DistributedDataParallel(nn.Linear(4, 1).to(torch.float64))
    inputs = torch.ones(8, 4, dtype=torch.float64) + dist.get_rank()
    model(inputs).pow(2).mean().backward()
    return model


def detect(model):
    """Call it between backward and the optimizer's step."""
    distance = gradients.largest_difference(model)
    if distance > 0:
        return f"the ranks' gradients differ by up to {distance:.2g}"
