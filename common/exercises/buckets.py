"""The checker of `buckets`: which gradients share a message, and what each one is when the message has arrived."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from common.exercises.compare import flat, gradients, near, plain, side_by_side, wrong_means
from common.exercises.stage import load_name
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


def named(buckets: object, module: nn.Module) -> object:
    """The buckets as lists of names, or what came instead of buckets."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    try:
        return [[names[parameter] for parameter in bucket] for bucket in buckets]  # type: ignore[attr-defined]
    except (TypeError, KeyError):
        return plain(buckets)


def filled_by_the_small_one(capacity: int) -> object:
    module = Parameters()
    return named([bucket.parameters for bucket in _fill_buckets(module, capacity)], module)


def run(path: str) -> dict:
    """On one rank: the buckets for each capacity, and the gradients before and after one has been averaged."""
    small = BucketedDDP(Parameters())
    small().backward()
    module = Parameters()
    with observed() as traffic:
        fill_buckets = load_name(path, "fill_buckets")
        average_bucket = load_name(path, "average_bucket")
        buckets = []
        for capacity in CAPACITIES:
            buckets.append(named(fill_buckets(list(module.parameters()), capacity), module))
        if buckets != [filled_by_the_small_one(capacity) for capacity in CAPACITIES]:
            return {"buckets": buckets}
        module().backward()
        own = gradients(module)
        average_bucket(list(module.parameters()))
    return {
        "buckets": buckets,
        "own": own,
        "after": gradients(module),
        "parameters": [plain(parameter.flatten()) for parameter in module.parameters()],
        "means": gradients(small),
        "messages": len(traffic.messages),
    }


def finding(results: list[dict]) -> str | None:
    for capacity, buckets in zip(CAPACITIES, results[0]["buckets"], strict=True):
        found = wrong_buckets(capacity, buckets)
        if found:
            return found
    return wrong_gradients(results)


def wrong_buckets(capacity: int, buckets: Any) -> str | None:
    """A finding about the buckets of one capacity."""
    expected = filled_by_the_small_one(capacity)
    if buckets == expected:
        return None
    title = (
        "the order is not DDP's: from the last parameter, whose gradient backward computes first, to the first, in each"
        " bucket and from one to the next"
    )
    is_list_of_lists = isinstance(buckets, list) and all(isinstance(bucket, list) for bucket in buckets)
    inside = flat(buckets) if is_list_of_lists else [buckets]
    if not all(name in list(SHAPES) for name in inside):
        title = "fill_buckets returns a list of buckets, each a list of the parameters themselves"
    elif set(inside) < set(SHAPES):
        missing = ", ".join(sorted(set(SHAPES) - set(inside)))
        title = f"{missing} is in no bucket, so its gradient would never travel: the last bucket may be short"
    elif inside == list(SHAPES)[::-1]:
        title = (
            "a bucket is closed at another place. Close it when it holds at least the capacity (>=), in bytes"
            " (parameter.nbytes), after the parameter that fills it and not before, and count the next one from 0"
        )
    sizes = ", ".join(f"{name} {size}" for name, size in BYTES.items())
    return (
        f"capacity {capacity}: {title}\n    the parameters and their bytes: {sizes}"
        f"\n    yours: {buckets}\n    DDP's: {expected}"
    )


def wrong_gradients(results: list[dict]) -> str | None:
    after = [result["after"] for result in results]
    messages = [result["messages"] for result in results]
    means = results[0]["means"]
    if messages != [1] * len(results):
        title = f"a bucket of {len(SHAPES)} gradients is one message, so that its latency is paid once; the messages of"
        return side_by_side(f"{title} average_bucket:", messages, they_should_be=1)
    known = wrong_means(after, [result["own"] for result in results], means)
    if known is None:
        return None
    parts = {round(number, 6) for number in flat(after[0])}
    if near(after, [result["parameters"] for result in results]):
        known = "they are made of the parameters: pack `parameter.grad`"
    elif parts <= {round(mean, 6) for mean in flat(means)}:
        known = (
            "put all parts of the message back in the order in which they were packed, each beginning where the one"
            " before it ends"
        )
    title = f"the gradients of a, b, c, d and e in the bucket are not the means; {known}:"
    return side_by_side(title, after, means=means)
