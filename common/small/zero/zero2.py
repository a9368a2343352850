"""ZeRO-2: a rank keeps its part of the gradients too, and drops the rest while backward goes on."""

from torch import nn
from torch.optim import Optimizer

from common.small.ddp.replicas import broadcast_from_rank_0
from common.small.zero.shard import Shard


class ZeRO2:
    """An optimizer whose state and gradients are shared out: each of W ranks has 1/W of both.

    At any time there is one whole gradient, or a few: backward has just computed it, and the hook below has not yet
    reduced it. The first reduce-scatter of one rank meets the first of the others, the second meets the second, and so
    on. So all ranks must compute their gradients in the same order.

    Args:
        module, optimizer_class, settings: as of `ZeRO1`.
    """

    def __init__(self, module: nn.Module, optimizer_class: type[Optimizer], **settings) -> None:
        broadcast_from_rank_0(module)
        self.shards = []
        for parameter in module.parameters():
            if parameter.requires_grad:
                shard = Shard(parameter)
                self.shards.append(shard)
                # Backward calls it when it has computed the gradient.
                parameter.register_post_accumulate_grad_hook(lambda _, shard=shard: shard.reduce_gradient())
        self.optimizer = optimizer_class([shard.part for shard in self.shards], **settings)

    def step(self) -> None:
        """One step of all ranks with the mean gradients that backward has left. A collective."""
        self.optimizer.step()
        for shard in self.shards:
            shard.gather()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
