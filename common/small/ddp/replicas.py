"""Replicas start equal: every rank takes over what rank 0 has."""

import torch.distributed as dist
from torch import nn


def broadcast_from_rank_0(module: nn.Module) -> None:
    """Replace the parameters and buffers of `module` by those of rank 0, in place. A collective.

    Equal weights and equal gradients make equal steps, so this is needed only once. Buffers may drift apart later:
    they follow the data of their rank.
    """
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor.detach(), src=0)
