"""Uneven inputs without Join: the rank with one batch more waits in vain.

Backward through DDP is a collective: every rank must take part as often as
every other. The rank that runs out of batches leaves the loop, and the others
wait in their all-reduce; only a time-out ends that (by default 30 minutes with
gloo, 10 with nccl). Give all ranks equally many batches, or let `Join` (on an
Accelerator `join_uneven_inputs`) answer for those that have finished.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from common.pitfalls.stage import at, places

LEVELS = ("02_ddp_raw", "03_accelerate")
SYMPTOM = "hang"
TIMEOUT = 2


def train(model):
    # Rank 0 has four batches, rank 1 three.
    batches = torch.ones(7, 8, 4)[dist.get_rank() :: dist.get_world_size()]
    for step, inputs in enumerate(batches, start=1):
        at(f"step {step}")
        model(inputs).sum().backward()
    return len(batches)


def wrong():
    steps = train(DistributedDataParallel(nn.Linear(4, 1)))
    at("the barrier after the loop")
    dist.barrier()
    return steps


def right():
    model = DistributedDataParallel(nn.Linear(4, 1))
    with Join([model]):
        steps = train(model)
    at("the barrier after the loop")
    dist.barrier()
    return steps


def detect(outcome):
    if isinstance(outcome, RuntimeError):
        waiting = (f"rank {r} in {been[-1]}" for r, been in enumerate(places()))
        return f"no end: {', '.join(waiting)}"
