"""A comparison of the ranks' gradients, for the checks of three pitfalls."""

from torch import nn
from torch.nn.utils import parameters_to_vector

from common.process_group import all_gather_object
from common.weights import distance


def largest_difference(model: nn.Module) -> float:
    """The largest difference of a gradient on rank 0 and on another rank."""
    mine = parameters_to_vector([each.grad for each in model.parameters()])
    first, *others = all_gather_object(mine)
    return max(distance(first, other) for other in others)
