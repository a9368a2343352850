"""Scale the loss, and skip a step on all ranks together.

fp16 holds no number between 0 and 6e-8, and none above 65504. A small gradient becomes 0 in it. If the loss is
multiplied by a scale, so is every gradient, and the small ones survive; before the step they are divided by it again.
With too large a scale a gradient overflows: it becomes inf or nan. Then the step is skipped and the scale is halved.
Write the class LossScaler. A training loop uses it like this:

    scaler = LossScaler(scale=1024.0, growth_interval=2)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()

`scale` returns the loss times the scale. `step` divides the gradients of the optimizer's parameters, which are in
`optimizer.param_groups`, and calls `optimizer.step()`, unless a gradient is inf or nan. `update` halves the scale after
a step that was skipped. It doubles the scale after `growth_interval` steps in a row of which none was skipped, and then
counts them anew.

The ranks share out the parameters, as in ZeRO: the gradients are averaged already, and each rank has an optimizer with
those of its own part. So an overflow may be on one rank, where no other rank sees it. Yet either all ranks make a step
or none does, and all have the same scale.

    python -m common.ladder check loss_scaler my_loss_scaler.py
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer


class LossScaler:
    """The number by which the loss is multiplied, and which follows the overflows."""

    def __init__(self, scale: float, growth_interval: int) -> None:
        self.factor = scale
        self.growth_interval = growth_interval

    def get_scale(self) -> float:
        return self.factor

    def scale(self, loss: Tensor) -> Tensor:
        raise NotImplementedError("return the loss times the scale")

    def step(self, optimizer: Optimizer) -> None:
        """Make a step with the true gradients, on all ranks or on none."""
        raise NotImplementedError("divide the gradients, look for inf and nan on all ranks, and step or skip")

    def update(self) -> None:
        """Choose the scale of the next step."""
        raise NotImplementedError("halve the scale, double it, or leave it")
