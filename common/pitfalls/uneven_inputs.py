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


def train(model, trace):
    # Rank 0 has four batches, rank 1 three.
    batches = torch.ones(7, 8, 4)[dist.get_rank() :: dist.get_world_size()]
    for step, inputs in enumerate(batches, start=1):
        trace.note(f"step {step}")
        model(inputs).sum().backward()
    return len(batches)


def wrong(trace):
    steps = train(DistributedDataParallel(nn.Linear(4, 1)), trace)
    trace.note("the barrier after the loop")
    dist.barrier()
    return steps


def right(trace):
    model = DistributedDataParallel(nn.Linear(4, 1))
    with Join([model]):
        steps = train(model, trace)
    trace.note("the barrier after the loop")
    dist.barrier()
    return steps


def detect(outcome, trace):
    if isinstance(outcome, RuntimeError):
        return f"no end: {trace.last_notes()}"
