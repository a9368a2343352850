"""The checker of `buckets`: which gradients share a message, and what each one is when the message has arrived."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from common.exercises.compare import flat, gradients, near, side_by_side, wrong_means
from common.exercises.stage import SolutionFailed, load_name
from common.exercises.traffic import observed
from common.small.ddp.bucketed import BucketedDDP, _fill_buckets

MINUTES = 25
READ = "common/small/ddp/README.md"
SAME_AS = "BucketedDDP (common/small/ddp/bucketed.py)"
WORLD_SIZES = (2, 3)
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


def run(path: str) -> dict:
    """On one rank: the gradients before and after a bucket has been averaged, and those that are right."""
    small = BucketedDDP(Parameters())
    small().backward()
    module = Parameters()
    with observed() as traffic:
        fill_buckets = load_name(path, "fill_buckets")
        for capacity in CAPACITIES:
            buckets = named(fill_buckets(list(module.parameters()), capacity), module)
            expected = named([bucket.parameters for bucket in _fill_buckets(module, capacity)], module)
            if buckets != expected:
                raise SolutionFailed(wrong_buckets(capacity, buckets, expected))
        module().backward()
        own = gradients(module)
        load_name(path, "average_bucket")(list(module.parameters()))
    return {
        "own": own,
        "after": gradients(module),
        "means": gradients(small),
        "messages": len(traffic.messages),
    }


def wrong_buckets(capacity: int, buckets: list[list[str]], expected: list[list[str]]) -> str:
    title = (
        "go from the last parameter, whose gradient backward computes first, to the first, and leave none out (the last"
        " bucket may be short)"
    )
    if flat(buckets) == flat(expected):
        title = (
            "close a bucket when it holds at least the capacity (>=), in bytes (parameter.nbytes), after the parameter"
            " that fills it and not before, and count the next one from 0"
        )
    sizes = ", ".join(f"{name} {size}" for name, size in BYTES.items())
    return (
        f"the buckets of capacity {capacity} are not DDP's; {title}\n    the parameters and their bytes: {sizes}"
        f"\n    yours: {buckets}\n    DDP's: {expected}"
    )


def finding(results: list[dict]) -> str | None:
    messages = [result["messages"] for result in results]
    if messages != [1] * len(results):
        title = f"a bucket of {len(SHAPES)} gradients is one message, so that its latency is paid once; the messages of"
        return side_by_side(f"{title} average_bucket:", messages, they_should_be=1)
    after = [result["after"] for result in results]
    means = results[0]["means"]
    mistake = wrong_means(after, [result["own"] for result in results], means)
    if mistake is None:
        return None
    has_all_numbers = near(sorted(flat(after[0])), sorted(flat(means)))
    if has_all_numbers and not near(after[0], means):
        mistake = "put the parts back in the order in which they were packed, each where the one before it ends"
    return side_by_side(f"the gradients of a, b, c, d and e are not the means; {mistake}:", after, means=means)
