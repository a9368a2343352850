"""Step 1: average all gradients when backward has ended."""

import torch.distributed as dist
from torch import nn

from common.small.ddp.replicas import broadcast_from_rank_0


class NaiveDDP(nn.Module):
    """A replica whose gradients the training loop averages by a call:

        loss.backward()
        model.average_gradients()
        optimizer.step()

    To accumulate gradients over several micro-batches, call `average_gradients` after the last one only.

    Args:
        module: the network, the same on every rank of the default process group; its weights become rank 0's.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.world_size = dist.get_world_size()
        broadcast_from_rank_0(module)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def average_gradients(self) -> None:
        """Replace every gradient by its mean over the ranks. A collective.

        The ranks call one all-reduce after the other, in the same order. Nothing is computed meanwhile. All ranks must
        have gradients of the same parameters: otherwise those of different parameters are added up.
        """
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.world_size
