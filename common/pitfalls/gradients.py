"""What pitfalls of the gradients share: samples, and a comparison of ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector

from common.process_group import all_gather_object
from common.weights import distance


def own_samples(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Eight samples of four numbers, on every rank others."""
    data = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(8, 4, generator=data, dtype=dtype)


def largest_gradient_difference(model: nn.Module) -> float:
    """The largest difference of a gradient on rank 0 and on another rank."""
    mine = parameters_to_vector([each.grad for each in model.parameters()])
    first, *others = all_gather_object(mine)
    return max(distance(first, other) for other in others)
