"""ZeRO-1: each rank keeps the optimizer's state for its part of every parameter."""

from torch import nn
from torch.optim import Optimizer

from common.small.ddp.replicas import broadcast_from_rank_0
from common.small.zero.shard import Shard


class ZeRO1:
    """An optimizer whose state is shared out: each of W ranks has 1/W of it.

    It sees parts of parameters. So its step of one number must not depend on the others, as is so for SGD and AdamW.

    Args:
        module: the network on this rank; its weights become rank 0's.
        optimizer_class, settings: the optimizer of the parts, such as `torch.optim.AdamW` and `lr=1e-3`.
    """

    def __init__(self, module: nn.Module, optimizer_class: type[Optimizer], **settings) -> None:
        broadcast_from_rank_0(module)
        self.shards = [Shard(parameter) for parameter in module.parameters() if parameter.requires_grad]
        self.optimizer = optimizer_class([shard.part for shard in self.shards], **settings)

    def step(self) -> None:
        """One step of all ranks with the mean of their gradients, of the same parameters on each. A collective."""
        for shard in self.shards:
            if shard.parameter.grad is not None:  # as for an optimizer, a parameter without one stays as it is
                shard.reduce_gradient()
        self.optimizer.step()
        for shard in self.shards:
            shard.gather()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        for shard in self.shards:
            shard.parameter.grad = None  # of a backward that no step followed
