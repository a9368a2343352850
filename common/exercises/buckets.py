"""The checker of `buckets`: which gradients share a message, and what each one is when the message has arrived."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from common.exercises.checker import Checker
from common.exercises.compare import Gradients, flat, gradients, near, wrong_means
from common.exercises.mistake import Mistake, SolutionFailed
from common.exercises.stage import load_name
from common.exercises.traffic import observed
from common.small.ddp.bucketed import BucketedDDP, fill_buckets

FACTORS = (1.0, 3.2, 8.0)  # of the gradients, by rank: their mean has no exact float32
SHAPES = {"a": (2, 2), "b": (2,), "c": (3,), "d": (1,), "e": (5,)}  # of the parameters, with numbers of 8 bytes
BYTES = {name: 8 * math.prod(shape) for name, shape in SHAPES.items()}
# In bytes. At 24, what e has too much would close the next bucket early if it were carried over.
CAPACITIES = (40, 24, 10_000, 1)


class Parameters(nn.Module):
    """Parameters of different shapes, whose gradients differ in every number, and from the parameters too."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.full(shape, 100.0).double()))

    def forward(self) -> torch.Tensor:
        """A loss in which the gradient of a number is its position among all numbers, times the rank's factor."""
        numbers = torch.cat([parameter.flatten() for parameter in self.parameters()])
        positions = torch.arange(1.0, len(numbers) + 1).double()
        return FACTORS[dist.get_rank()] * (positions * numbers).sum()


def named(buckets: Iterable[list], module: nn.Module) -> list[list[str]]:
    """The buckets as lists of the parameters' names."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    return [[names.get(parameter, "no parameter") for parameter in bucket] for bucket in buckets]


def reference() -> Gradients:
    module = Parameters()
    module().backward()
    small = BucketedDDP(Parameters())
    small().backward()
    return Gradients(gradients(module), gradients(small))


def attempt(path: str) -> Gradients:
    module = Parameters()
    with observed() as traffic:
        fill_buckets = load_name(path, "fill_buckets")
        for capacity in CAPACITIES:
            buckets = named(fill_buckets(list(module.parameters()), capacity), module)
            check_buckets(buckets, module, capacity)
        module().backward()
        own = gradients(module)
        load_name(path, "average_bucket")(list(module.parameters()))
    messages = len(traffic.messages)
    if messages != 1:
        raise SolutionFailed(Mistake("not one message").at(f"{messages} messages of average_bucket"))
    return Gradients(own, gradients(module))


def check_buckets(buckets: list[list[str]], module: nn.Module, capacity: int) -> None:
    expected = named([bucket.parameters for bucket in fill_buckets(module, capacity)], module)
    if buckets == expected:
        return
    name = "capacity" if flat(buckets) == flat(expected) else "order"
    sizes = ", ".join(f"{name} {size}" for name, size in BYTES.items())
    details = f"    the parameters and their bytes: {sizes}\n    yours: {buckets}\n    DDP's: {expected}"
    raise SolutionFailed(Mistake(name, f"capacity {capacity}", details))


def finding(made: Gradients, expected: Gradients) -> Mistake | None:
    mistake = wrong_means(made.after, expected)
    if mistake is None:
        return None
    of_rank_0 = made.after[0]
    means = expected.after[0]
    has_all_numbers = near(sorted(flat(of_rank_0)), sorted(flat(means)))
    if has_all_numbers and not near(of_rank_0, means):
        mistake = Mistake("unpacked elsewhere")
    return mistake.with_values("the gradients of a, b, c, d and e", made.after, {"means": means})


CHECKER = Checker(reference, attempt, finding)
