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


def train(model, stage):
    # Rank 0 has four batches, rank 1 three.
    batches = torch.ones(7, 8, 4)[dist.get_rank() :: dist.get_world_size()]
    for step, inputs in enumerate(batches, start=1):
        stage.at(f"step {step}")
        model(inputs).sum().backward()
    return len(batches)


def wrong(stage):
    steps = train(DistributedDataParallel(nn.Linear(4, 1)), stage)
    stage.at("the barrier after the loop")
    dist.barrier()
    return steps


def right(stage):
    model = DistributedDataParallel(nn.Linear(4, 1))
    with Join([model]):
        steps = train(model, stage)
    stage.at("the barrier after the loop")
    dist.barrier()
    return steps


def detect(outcome, stage):
    if isinstance(outcome, RuntimeError):
        notes = enumerate(stage.places())
        waiting = [f"rank {rank} in {places[-1]}" for rank, places in notes]
        return f"no end: {', '.join(waiting)}"
