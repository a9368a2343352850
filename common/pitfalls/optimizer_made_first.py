"""The optimizer made before `fully_shard`: it steps parameters that are gone.

`fully_shard` replaces each parameter by a DTensor, of which a rank holds a
part. An optimizer that was made before keeps the old, whole ones. They get no
gradient, so its steps do nothing: no error, and the loss stays as it is. Make
the optimizer after sharding. `Accelerator.prepare` puts the sharded parameters
into the optimizer.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def shard(model):
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def losses(model, optimizer):
    found = []
    for _ in range(5):
        loss = model(torch.ones(8, 4)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def wrong():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shard(model)
    return losses(model, optimizer)


def right():
    model = nn.Linear(4, 2)
    shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return losses(model, optimizer)


def detect(losses):
    """`losses` are of steps that see the same samples."""
    if losses[-1] == losses[0]:
        return f"after {len(losses)} steps the loss is still {losses[0]:.4f}"
