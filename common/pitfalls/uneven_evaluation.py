"""Uneven batches in an evaluation under FSDP: a forward gathers, and waits.

Under DDP the ranks may evaluate unequally many batches with `model.module`.
Under FSDP a layer's parameters are gathered when it computes, without gradients
too. So a forward is a collective: a rank that has no batch left leaves the
others waiting in it. Give all ranks equally many, and do not count what is
there for that alone.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def own_batches():
    """Rank 0 has four, rank 1 three."""
    return torch.ones(7, 8, 4)[dist.get_rank() :: 2]


@torch.no_grad()
def evaluate(batches, trace):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for number, inputs in enumerate(batches, start=1):
        trace.note(f"batch {number}")
        model(inputs)
    trace.note("the barrier after the loop")
    dist.barrier()


def wrong(trace):
    evaluate(own_batches(), trace)


def right(trace):
    own = own_batches()
    repeated = own[: 4 - len(own)]  # computed, and not counted
    evaluate(torch.cat([own, repeated]), trace)


def detect(outcome, trace):
    if isinstance(outcome, RuntimeError):
        return f"no end: {trace.last_notes()}"
