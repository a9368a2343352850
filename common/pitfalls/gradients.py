"""A comparison of the ranks' gradients, for the checks of three pitfalls."""

from torch import nn
from torch.nn.utils import parameters_to_vector

from common.process_group import all_gather_object
from common.weights import max_difference


def largest_difference(model: nn.Module) -> float:
    """The largest difference of a gradient on rank 0 and on another rank."""
    mine = parameters_to_vector([each.grad for each in model.parameters()])
    first, *others = all_gather_object(mine)
    return max(max_difference(first, other) for other in others)
