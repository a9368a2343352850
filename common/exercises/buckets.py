"""The checker of `buckets`: which gradients share a message, and what each one is when the message has arrived."""

import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.exercises.compare import (
    agreed,
    divisors,
    exactly,
    in_one_row,
    mistake,
    near,
    plain,
    scaled,
    shown,
    side_by_side,
)
from common.exercises.link import CHANGED_TOO_EARLY, slow_link
from common.exercises.stage import SolutionFailed, in_rounds, load_name, on_ranks
from common.small.ddp.bucketed import Bucket, _fill_buckets

MINUTES = 25
READ = "common/small/ddp/README.md"
SAME_AS = "BucketedDDP (common/small/ddp/bucketed.py) and torch's DistributedDataParallel"
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


def gradients(module: nn.Module) -> list[list[float] | None]:
    return [in_one_row(parameter.grad) for parameter in module.parameters()]


def named(buckets: object, module: nn.Module) -> object:
    """The buckets as lists of names, or what came instead of buckets."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    try:
        return [[names[parameter] for parameter in bucket] for bucket in buckets]  # type: ignore[attr-defined]
    except (TypeError, KeyError):
        return plain(buckets)


def filled_by_torch(module: nn.Module, capacity: int) -> list[list[str]]:
    parameters = [parameter.detach() for parameter in module.parameters()][::-1]
    numbers, _ = dist._compute_bucket_assignment_by_size(parameters, [capacity])
    names = list(SHAPES)[::-1]
    return [[names[number] for number in bucket] for bucket in numbers]


def averaged_by_torch() -> list:
    model = DistributedDataParallel(Parameters())
    model().backward()
    return gradients(model)


def averaged_by_the_small_one() -> list:
    module = Parameters()
    module().backward()
    bucket = Bucket(list(module.parameters()))
    bucket.start_all_reduce(dist.get_world_size())
    bucket.finish()
    return gradients(module)


def run(path: str) -> dict:
    """On one rank: the buckets for each capacity, and the gradients before and after one has been averaged."""
    expected = agreed(real=averaged_by_torch(), small=averaged_by_the_small_one())
    module = Parameters()
    expected_buckets = []
    for capacity in CAPACITIES:
        small = [[*bucket.parameters] for bucket in _fill_buckets(module, capacity)]
        expected_buckets.append(agreed(real=filled_by_torch(module, capacity), small=named(small, module)))
    with slow_link() as link:
        fill_buckets = load_name(path, "fill_buckets")
        average_bucket = load_name(path, "average_bucket")
        buckets = []
        for capacity in CAPACITIES:
            parameters = list(module.parameters())
            buckets.append(named(fill_buckets(parameters, capacity), module))
        result = {"buckets": buckets, "expected_buckets": expected_buckets}
        if not near(buckets, expected_buckets):
            return result
        module().backward()
        own = gradients(module)
        bucket = list(module.parameters())
        average_bucket(bucket)
        refuse_other_shapes(module)
        return {
            **result,
            "parameters": [in_one_row(parameter) for parameter in module.parameters()],
            "own": own,
            "after": gradients(module),
            "expected": expected,
            "messages": len(link.messages),
            "not_waited": sum(message.times_waited == 0 for message in link.messages),
            "was_changed": any(message.was_changed for message in link.messages),
        }


def refuse_other_shapes(module: nn.Module) -> None:
    """Raise SolutionFailed if a gradient has not the shape of its parameter, with which no optimizer could step."""
    for name, parameter in module.named_parameters():
        if parameter.grad is not None and parameter.grad.shape != parameter.shape:
            raise SolutionFailed(
                f"the parameter {name} has the shape {list(parameter.shape)}, and its gradient now has"
                f" {list(parameter.grad.shape)}: view_as gives a part of the message the shape of its parameter"
            )


def check(path: Path) -> list[str]:
    """Five parameters in buckets of three capacities; then one bucket of all of them, on two and on three ranks."""

    def on(world_size: int) -> list[str | None]:
        results = on_ranks(world_size, run, path)
        for number in range(len(CAPACITIES)):
            found = wrong_buckets(number, results[0])
            if found:
                return [found]
        return [wrong_gradients(results)]

    return in_rounds(WORLD_SIZES, on)


def wrong_buckets(number: int, result: dict) -> str | None:
    """A finding about the buckets of one capacity."""
    buckets = result["buckets"][number]
    expected = result["expected_buckets"][number]
    if buckets == expected:
        return None
    title = "the order is not DDP's: from the last parameter to the first, in each bucket and from one to the next"
    if not isinstance(buckets, list) or not all(isinstance(bucket, list) for bucket in buckets):
        title = "fill_buckets returns a list of buckets, each a list of parameters"
    else:
        inside = [name for bucket in buckets for name in bucket]
        if not all(name in list(SHAPES) for name in inside):
            title = "a bucket is a list of the parameters themselves, not of their gradients or of anything else"
        elif set(inside) < set(SHAPES):
            missing = ", ".join(sorted(set(SHAPES) - set(inside)))
            title = f"{missing} is in no bucket, so its gradient would never travel: the last bucket may be short"
        elif inside == list(SHAPES):
            title = (
                "the buckets begin with the first layer, whose gradient backward computes last: then none is full"
                " before backward ends. Fill them from the last parameter to the first"
            )
        elif inside == list(SHAPES)[::-1]:
            title = (
                "a bucket is closed at another place: close it when it holds at least the capacity, in bytes, and count"
                " the bytes of the next one from 0"
            )
            known = mistake(buckets, with_mistakes(CAPACITIES[number]))
            title = f"{title}. {known}" if known else title
    sizes = ", ".join(f"{name} {size}" for name, size in BYTES.items())
    return (
        f"capacity {CAPACITIES[number]}: {title}\n    the parameters and their bytes: {sizes}"
        f"\n    yours: {buckets}\n    DDP's: {expected}"
    )


def with_mistakes(capacity: int) -> dict[str, list[list[str]]]:
    """The buckets that another rule makes, by the sentence about it."""
    return {
        "Yours are closed when they hold more than that: >= is for exactly as many": filled(capacity + 1),
        "Yours count numbers, of 8 bytes each: parameter.nbytes counts bytes": filled(8 * capacity),
        "Yours never count from 0 again": filled(capacity, counts_anew=False),
        "Yours are closed before the parameter that fills them: close them after it": filled_to_at_most(capacity),
    }


def filled(capacity: int, counts_anew: bool = True) -> list[list[str]]:
    """Buckets that are closed at `capacity` bytes or more."""
    buckets: list[list[str]] = [[]]
    size = 0
    for name in reversed(BYTES):
        buckets[-1].append(name)
        size += BYTES[name]
        if size >= capacity:
            buckets.append([])
            if counts_anew:
                size = 0
    return [bucket for bucket in buckets if bucket]


def filled_to_at_most(capacity: int) -> list[list[str]]:
    """Buckets of at most `capacity` bytes, but for a parameter that alone is larger."""
    buckets: list[list[str]] = [[]]
    size = 0
    for name in reversed(BYTES):
        if size + BYTES[name] > capacity:
            buckets.append([])
            size = 0
        buckets[-1].append(name)
        size += BYTES[name]
    return [bucket for bucket in buckets if bucket]


def wrong_gradients(results: list[dict]) -> str | None:
    after = [result["after"] for result in results]
    own = [result["own"] for result in results]
    mean = results[0]["expected"]
    world_size = len(results)
    messages = [result["messages"] for result in results]
    if results[0]["not_waited"]:
        title = "average_bucket has returned while its all-reduce was under way: wait for the handle"
    elif results[0]["was_changed"]:
        title = f"the message {CHANGED_TOO_EARLY}"
    elif not any(messages):
        return "average_bucket has called no all_reduce, which gives the sum to all ranks"
    elif messages != [1] * world_size:
        title = f"a bucket of {len(SHAPES)} gradients is one message, so that its latency is paid once; the messages of"
        return side_by_side(f"{title} average_bucket:", messages, they_should_be=1)
    elif any(None in of_rank for of_rank in after):
        title = "average_bucket has left a parameter without a gradient"
    else:
        if exactly(after, [mean] * world_size):
            return None
        total = scaled(mean, world_size)
        known = mistake(
            after,
            {
                "they are the sums over the ranks: put back what is divided by the world size": [total] * world_size,
                "they are each rank's own: put the means from the message back to where the gradients are": own,
                "they are made of the parameters: pack `parameter.grad`": [result["parameters"] for result in results],
            },
        )
        divided_by = divisors(after, total)
        in_place = [name for name, found, right in zip(SHAPES, after[0], mean, strict=True) if near(found, right)]
        if known is None and divided_by:
            known = (
                f"the sums in a, b, c, d and e were divided by {shown(divided_by)}: divide the message once, by the"
                " world size"
            )
        elif known is None and in_place:
            known = (
                f"only {', '.join(in_place)} has its own part of the message: put all parts back in the order in which"
                " they were packed, each beginning where the one before it ends"
            )
        title = "the gradients in the bucket are not the means over the ranks"
        title = f"{title}; {known}" if known else title
    return side_by_side(f"{title}; the gradients of a, b, c, d and e:", after, they_should_be=mean)
