"""The costs of a network: all that a prediction knows of it. `count` finds them."""

from dataclasses import dataclass
from typing import NamedTuple


class Gradient(NamedTuple):
    """A parameter tensor's numbers, and the multiply-adds that backward has done when its gradient is there."""

    parameters: int
    done: int


@dataclass(frozen=True)
class NetworkCosts:
    """The costs of a network's training step.

    Attributes:
        gradients: in the order in which backward computes them.
        multiply_adds: of the forward of one sample.
        operators: how many one training step runs.
        bytes_of_a_sample: by how many bytes more these operators read and write for each sample of the batch.
    """

    name: str
    gradients: tuple[Gradient, ...]
    multiply_adds: int
    operators: int
    bytes_of_a_sample: int

    @property
    def parameters(self) -> int:
        return sum(gradient.parameters for gradient in self.gradients)
