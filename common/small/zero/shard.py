"""A parameter in equal parts, one for each rank, and the two collectives that connect the parts.

A *reduce-scatter* adds up the ranks' tensors and gives each rank its part of the sum. An *all-gather* gives every rank
the parts of all. One after the other they are an all-reduce.
"""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Shard:
    """This rank's part of a parameter. The rank's optimizer updates the part, and nothing else of the parameter.

    A parameter of ten numbers on four ranks is filled up with zeros, so that it can be cut into equal parts:

        rank 0    rank 1    rank 2    rank 3
        0 1 2     3 4 5     6 7 8     9 - -

    Attributes:
        parameter: the network's own, which is whole.
        flat: the memory in which the numbers of `parameter` lie, the zeros behind them included.
        part: this rank's part of `flat`, in the same memory, as a parameter for an optimizer.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.world_size = dist.get_world_size()
        numbers = parameter.numel()
        part_size = math.ceil(numbers / self.world_size)
        start = part_size * dist.get_rank()
        self.flat = F.pad(parameter.data.flatten(), (0, part_size * self.world_size - numbers))
        self.part = nn.Parameter(self.flat[start : start + part_size])
        # The network computes with this memory, so gathering the parts into `flat` updates the parameter.
        parameter.data = self.flat[:numbers].view_as(parameter)

    def reduce_gradient(self) -> None:
        """Add this rank's part of the mean gradient to `part.grad` by a reduce-scatter, and drop the rest."""
        gradient = F.pad(self.parameter.grad.flatten(), (0, self.flat.numel() - self.parameter.numel()))
        self.parameter.grad = None
        mean = torch.empty_like(self.part)
        dist.reduce_scatter_tensor(mean, gradient)
        mean /= self.world_size
        self.part.grad = mean if self.part.grad is None else self.part.grad + mean

    def gather(self) -> None:
        """Make the parameter whole again by an all-gather, after the ranks have updated their parts."""
        dist.all_gather_into_tensor(self.flat, self.part.detach())
