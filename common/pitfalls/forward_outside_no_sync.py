"""Forward outside of `no_sync`: every micro-batch is all-reduced after all.

DDP decides in its forward whether backward will average. `no_sync` around
backward alone comes too late, and each micro-batch sends all gradients. They
are right in the end: averages are equal on all ranks, and to average them again
changes nothing. So only the clock shows it. The other way round, with all
forwards inside and only the last backward outside, nothing is sent, and the
ranks drift apart. Put both inside, as `accelerator.accumulate` does.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.pitfalls import gradients


def wrong():
    model = DistributedDataParallel(nn.Linear(4, 1))
    inputs = torch.ones(8, 4) + dist.get_rank()
    averaged = []
    for number in (1, 2, 3, 4):
        loss = model(inputs * number).pow(2).mean() / 4
        with nullcontext() if number == 4 else model.no_sync():
            loss.backward()
        averaged.append(gradients.largest_difference(model) == 0)
    return averaged


def right():
    model = DistributedDataParallel(nn.Linear(4, 1))
    inputs = torch.ones(8, 4) + dist.get_rank()
    averaged = []
    for number in (1, 2, 3, 4):
        with nullcontext() if number == 4 else model.no_sync():
            loss = model(inputs * number).pow(2).mean() / 4
            loss.backward()
        averaged.append(gradients.largest_difference(model) == 0)
    return averaged


def detect(averaged):
    """True in `averaged`: after a micro-batch all ranks have one gradient."""
    if any(averaged[:-1]):
        return f"the gradients are averaged {sum(averaged)} times in one step"
