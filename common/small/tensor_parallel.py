"""Tensor parallelism: every rank computes the same batch, with its own part of the weights of two linear layers.

The first layer is cut by its outputs and the second one by its inputs, at the same places. So what a rank computes in
the first layer is just what it needs in the second one, and nothing is sent between them. For BasicNet on two ranks:

                          rank 0                rank 1                what is sent
    fc1   9216 → 128      outputs 0 … 63        outputs 64 … 127      backward: the gradient of the inputs
    fc2    128 → 10       inputs 0 … 63         inputs 64 … 127       forward: the outputs
    all other layers      whole                 whole                 nothing

A linear layer computes x A. The first one is cut by the columns of A and the second one by its rows, hence their names.
torch stores A transposed: the columns of A are dimension 0 of `weight`. MODEL_PARALLEL.md has a picture.

Source: Shoeybi et al., Megatron-LM: Training multi-billion parameter language models using model parallelism, 2019.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


def cut_linear_layers(model) -> None:
    """Replace the layers `fc1` and `fc2` of BasicNet by this rank's parts of them.

    Every rank builds the network from the same seed, trains on the same batches, and makes its optimizer after the cut.
    Dropout before `fc1` has to drop the same units on all ranks. Between the two layers it drops a rank's own outputs.
    """
    if isinstance(model.fc1, ColumnParallelLinear):
        raise ValueError("the layers of this model are cut already")
    model.fc1 = ColumnParallelLinear(model.fc1)
    model.fc2 = RowParallelLinear(model.fc2)


class ColumnParallelLinear(nn.Module):
    """Some of the outputs of a linear layer: (N, inputs) → (N, outputs / world size)."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = part_of(linear.weight, dim=0)
        self.bias = part_of(linear.bias, dim=0)

    def forward(self, inputs: Tensor) -> Tensor:
        return F.linear(_SumGradients.apply(inputs), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """A linear layer of which each rank has some of the inputs: (N, inputs / world size) → (N, outputs)."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = part_of(linear.weight, dim=1)
        self.bias = linear.bias

    def forward(self, inputs: Tensor) -> Tensor:
        # The bias is whole on every rank, and added to the sum: before it, it would be added once for each rank.
        return _SumOutputs.apply(F.linear(inputs, self.weight)) + self.bias


def part_of(parameter: Tensor, dim: int) -> nn.Parameter:
    """This rank's part of a parameter; the parts are as equal as possible. A copy, so that the whole can be freed."""
    parts = parameter.detach().tensor_split(dist.get_world_size(), dim)
    return nn.Parameter(parts[dist.get_rank()].clone(), parameter.requires_grad)


class _SumGradients(torch.autograd.Function):
    """Forward: nothing. Backward: the sum over the ranks, each of which knows the gradient through its outputs only."""

    @staticmethod
    def forward(ctx, inputs: Tensor) -> Tensor:
        return inputs.view_as(inputs)  # autograd wants a tensor of the function's own

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        gradient = gradient.clone(memory_format=torch.contiguous_format)  # the given one is autograd's
        dist.all_reduce(gradient)
        return gradient


class _SumOutputs(torch.autograd.Function):
    """Forward: the sum over the ranks, each of which has summed over its own inputs only. Backward: nothing.

    From the whole outputs every rank computes the same loss, so every rank has their whole gradient already.
    """

    @staticmethod
    def forward(ctx, outputs: Tensor) -> Tensor:
        dist.all_reduce(outputs)
        ctx.mark_dirty(outputs)  # written in place
        return outputs

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient
