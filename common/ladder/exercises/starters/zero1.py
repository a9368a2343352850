"""Share out the optimizer's state (ZeRO-1).

AdamW keeps two numbers for each number of the parameters: its moments. Under DDP every rank keeps all of them, and
makes the same step as all others. With W ranks 1/W is enough: a rank steps its own part of the parameters, and the
ranks exchange the parts. Write the class ZeRO1. A training loop uses it like this:

    optimizer = ZeRO1(module, lr=0.1)
    loss_of(module(inputs)).backward()
    optimizer.step()
    optimizer.zero_grad()

`module` is no DDP: after backward each rank has the gradients of its own samples. All ranks begin with the same
weights, and have the weights of DDP with AdamW after each step. What else ZeRO1 is given, such as `lr`, is for
`torch.optim.AdamW`, of which each rank has one, for its own part.

There are two ways. Deal whole parameters out in turn, average the gradients by all-reduces, and let each parameter's
owner broadcast it. Or cut every parameter into W equal parts, and let a reduce-scatter bring each rank its part of the
gradients, and an all-gather all parts of the parameters. The first is shorter, the second sends less.

    python -m common.ladder check zero1 my_zero1.py
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class ZeRO1:
    """AdamW with a state that is shared out over the ranks."""

    def __init__(self, module: nn.Module, **settings: Any) -> None:
        self.parameters = list(module.parameters())
        raise NotImplementedError("make a torch.optim.AdamW, with `settings`, for this rank's part of the parameters")

    def step(self) -> None:
        """Make one step of all ranks with the means of their gradients."""
        raise NotImplementedError("average the gradients, step this rank's part, and exchange the parts")

    def zero_grad(self) -> None:
        """Begin the next step without old gradients."""
        raise NotImplementedError("forget the gradients of all parameters")


if __name__ == "__main__":
    print(__doc__)
