"""The checker of `buckets`: which gradients share a message, and what each one is when the message has arrived."""

from collections.abc import Iterable
from types import ModuleType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from common.exercises.compare import Gradients, Mistake, check_means, flat, gradients
from common.exercises.traffic import Traffic
from common.small.ddp.bucketed import BucketedDDP, fill_buckets

FACTORS_BY_RANK = (1.0, 3.2, 8.0)  # their mean has no exact float32
PARAMETER_SHAPES = {"a": (2, 2), "b": (2,), "c": (3,), "d": (1,), "e": (5,)}  # a number has 8 bytes
# In bytes. At 24, what e has too much would close the next bucket early if it were carried over.
CAPACITIES = (40, 24, 10_000)


class Parameters(nn.Module):
    """Parameters of different shapes, whose gradients differ in every number, and from the parameters too."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in PARAMETER_SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.full(shape, 100.0).double()))

    def forward(self) -> torch.Tensor:
        """A loss in which the gradient of a number is its position among all numbers, times the rank's factor."""
        numbers = torch.cat([parameter.flatten() for parameter in self.parameters()])
        positions = torch.arange(1.0, len(numbers) + 1).double()
        return FACTORS_BY_RANK[dist.get_rank()] * (positions * numbers).sum()


def named(buckets: Iterable[list], module: nn.Module) -> list[list[str]]:
    names = {parameter: name for name, parameter in module.named_parameters()}
    return [[names.get(parameter, "no parameter") for parameter in bucket] for bucket in buckets]


class Result(NamedTuple):
    """The buckets for each capacity, the messages of `average_bucket`, and the gradients when they have arrived."""

    buckets: list
    messages: int
    gradients: list


def reference() -> Gradients:
    module = Parameters()
    module().backward()
    small = BucketedDDP(Parameters())
    small().backward()
    return Gradients(gradients(module), gradients(small))


def attempt(solution: ModuleType, traffic: Traffic) -> Result:
    module = Parameters()
    buckets = []
    for capacity in CAPACITIES:
        buckets.append(named(solution.fill_buckets(list(module.parameters()), capacity), module))
    module().backward()
    solution.average_bucket(list(module.parameters()))
    return Result(buckets, len(traffic.messages), gradients(module))


def check(actual: list[Result], expected: list[Gradients]) -> None:
    for capacity, buckets in zip(CAPACITIES, actual[0].buckets, strict=True):
        check_buckets(capacity, buckets)
    if actual[0].messages != 1:
        sentence = "average_bucket has to send five gradients in one message, so that its latency is paid once"
        raise Mistake(f"{sentence}. It sent {actual[0].messages} messages")
    after = [result.gradients for result in actual]
    check_means("the gradients of a, b, c, d and e, from one message,", after, expected)


def check_buckets(capacity: int, buckets: list[list[str]]) -> None:
    module = Parameters()
    right = named([bucket.parameters for bucket in fill_buckets(module, capacity)], module)
    if buckets == right:
        return
    if flat(buckets) == flat(right):
        sentence = (
            "close a bucket when it holds at least the capacity (>=), in bytes (parameter.nbytes), after the parameter "
            "that fills it and not before, and count the next one from 0"
        )
    else:
        sentence = "go from the last parameter to the first, and leave none out (the last bucket may be short)"
    sizes = {name: parameter.nbytes for name, parameter in module.named_parameters()}
    raise Mistake(
        f"a capacity of {capacity} bytes: {sentence}",
        {"the parameters' bytes": sizes, "your buckets": buckets, "DDP's": right},
    )
