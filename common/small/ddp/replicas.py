"""Replicas: which modules can be one, and how they start equal."""

import torch.distributed as dist
from torch import nn


def broadcast_from_rank_0(module: nn.Module) -> None:
    """Replace the parameters and buffers of `module` by those of rank 0, in place. A collective.

    Equal weights and equal gradients make equal steps, so this is needed only once. Buffers may drift apart later:
    they follow the data of their rank.
    """
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor.detach(), src=0)


def check_has_trainable_parameters(module: nn.Module) -> None:
    """Raise RuntimeError, as torch's DDP does, where no parameter is trained: the ranks have nothing to average."""
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise RuntimeError("no parameter of this module requires a gradient, so there is nothing to average")
