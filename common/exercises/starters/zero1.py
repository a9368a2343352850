"""Share out the optimizer's state (ZeRO-1).

AdamW keeps two numbers for each number of the parameters: its moments. Under DDP every rank keeps all of them, and
makes the same step as all others. With W ranks 1/W is enough: a rank steps its own part of the parameters, and the
ranks exchange the parts. Write the class ZeRO1. A training loop uses it like this:

    optimizer = ZeRO1(module, lr=0.1)
    loss_of(module(inputs)).backward()
    optimizer.step()
    optimizer.zero_grad()

`module` is no DDP: after backward each rank has the gradients of its own samples. All ranks begin with the same
weights, and have the weights of DDP with AdamW after each step. Each rank makes one `torch.optim.AdamW`, for its own
part of the parameters, and passes on to it the other arguments, such as `lr`. There are at least W parameters.

There are two ways. Deal whole parameters out in turn, average the gradients by all-reduces, and let each parameter's
owner broadcast it: all ranks call `dist.broadcast(tensor, src=owner)`. Or fill every parameter up with zeros until W
divides it, and cut it into W equal parts. Then `dist.reduce_scatter_tensor` brings each rank its part of the gradients,
and `dist.all_gather_into_tensor` all parts of the parameters. The first way is shorter, the second sends less.

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
