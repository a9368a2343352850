"""A mean of means over unequal micro-batches: samples in small ones weigh more.

Each micro-batch's loss is a mean over its samples, and DDP's gradient is a mean
over the ranks. A mean of means is right only if all micro-batches have equally
many samples. The tail of an epoch is shorter, a rank's shard may be, and in
sentences it is tokens that count. So sum the losses, and divide by the number
of samples on all ranks. DDP divides by the world size too, so multiply by it.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector


def samples():
    return torch.randn(20, 4, generator=torch.Generator().manual_seed(1))


def micro_batches():
    # Rank 0 has micro-batches of 8 and 4 samples, rank 1 of 6 and 2.
    parts = samples().split([8, 6, 4, 2])
    return parts[dist.get_rank() :: dist.get_world_size()]


def losses(model, inputs):
    return (model(inputs) - 1).pow(2).flatten()


def wrong():
    model = DistributedDataParallel(nn.Linear(4, 1))
    own = micro_batches()
    for inputs in own:
        loss = losses(model, inputs).mean() / len(own)
        loss.backward()
    return model


def right():
    model = DistributedDataParallel(nn.Linear(4, 1))
    own = micro_batches()
    total = torch.tensor(sum(map(len, own)))
    dist.all_reduce(total)
    for inputs in own:
        loss = losses(model, inputs).sum() / total * dist.get_world_size()
        loss.backward()
    return model


def detect(model):
    parameters = list(model.parameters())
    loss = losses(model.module, samples()).mean()
    exact = parameters_to_vector(torch.autograd.grad(loss, parameters))
    ours = parameters_to_vector(p.grad for p in parameters)
    distance = (ours - exact).norm() / exact.norm()
    if not distance <= 1e-4:  # nor is a nan
        return f"the gradient is {distance:.0%} off that of one large batch"
