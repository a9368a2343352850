"""The checker of `average_gradients`: which number each rank has as its gradient, and how it came about."""

from types import ModuleType

import torch
import torch.distributed as dist
from torch import nn

from common.exercises.compare import Gradients, check_means, gradients
from common.exercises.traffic import Traffic
from common.small.ddp.naive import NaiveDDP

# The gradients of the biases, by rank. On two and on three ranks no rank's own is the mean, nor the sum divided twice,
# and the mean is no whole number.
FIRST = (1.0, 3.2, 8.0)
LAST = (0.0, 2.2, 7.0)  # a gradient of zeros counts in the mean too


class ThreeLayers(nn.Module):
    """Two layers that are used, and between them one that takes no part in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 1)
        self.unused = nn.Linear(2, 1, bias=False)
        self.last = nn.Linear(2, 1)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        rank = dist.get_rank()
        return FIRST[rank] * self.first(values) + LAST[rank] * self.last(values)


def network() -> ThreeLayers:
    torch.manual_seed(0)
    return ThreeLayers().double()


def backward(model: nn.Module) -> None:
    model(torch.tensor([1.0, 10.0]).double()).sum().backward()


def reference() -> Gradients:
    small = NaiveDDP(network())
    backward(small)
    own = gradients(small)
    small.average_gradients()
    return Gradients(own, gradients(small))


def attempt(solution: ModuleType, _: Traffic) -> list:
    model = network()
    backward(model)
    solution.average_gradients(model)
    return gradients(model)


def check(actual: list[list], expected: list[Gradients]) -> None:
    check_means("the gradients of the first, the unused and the last layer", actual, expected)
