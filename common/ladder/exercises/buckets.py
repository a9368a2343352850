"""The checker of `buckets`: which gradients share a message, and what each one is when the message has arrived."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.ladder.exercises.compare import agreed, mistake, near, plain, side_by_side
from common.ladder.exercises.link import slow_link
from common.ladder.exercises.stage import SolutionFailed, load_name, on_ranks
from common.small.ddp.bucketed import Bucket, _fill_buckets

MINUTES = 25
READ = "common/small/ddp/README.md"
SAME_AS = "BucketedDDP (common/small/ddp/bucketed.py) and torch's DistributedDataParallel"
WORLD_SIZE = 2
FACTORS = (1.0, 3.0)  # of the gradients, by rank
SIZES = {"a": 4, "b": 2, "c": 3, "d": 1, "e": 5}  # numbers of 8 bytes in each parameter
CAPACITIES = (40, 10_000, 1)  # bytes


class Parameters(nn.Module):
    """Parameters of different sizes, whose gradients differ in every number."""

    def __init__(self) -> None:
        super().__init__()
        for name, size in SIZES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(size, dtype=torch.float64)))

    def forward(self) -> torch.Tensor:
        """A loss in which the gradient of a number is its position among all numbers, times the rank's factor."""
        numbers = torch.cat(list(self.parameters()))
        positions = torch.arange(1.0, len(numbers) + 1).double()
        return FACTORS[dist.get_rank()] * (positions * numbers).sum()


def gradients(module: nn.Module) -> list:
    return [plain(parameter.grad) for parameter in module.parameters()]


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
    names = list(SIZES)[::-1]
    return [[names[number] for number in bucket] for bucket in numbers]


def averaged_by_torch() -> list:
    model = DistributedDataParallel(Parameters())
    model().backward()
    return gradients(model)


def averaged_by_the_small_one() -> list:
    module = Parameters()
    module().backward()
    bucket = Bucket(list(module.parameters()))
    bucket.start_all_reduce(WORLD_SIZE)
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
        buckets = [named(fill_buckets(list(module.parameters()), capacity), module) for capacity in CAPACITIES]
        result = {"buckets": buckets, "expected_buckets": expected_buckets}
        if not near(buckets, expected_buckets):
            return result
        module().backward()
        own = gradients(module)
        average_bucket(list(module.parameters()))
        return {
            **result,
            "own": own,
            "after": gradients(module),
            "expected": expected,
            "messages": len(link.messages),
            "not_waited": sum(message.times_waited == 0 for message in link.messages),
        }


def check(path: Path) -> list[str]:
    """Five parameters in buckets of three capacities; then one bucket of all of them, on two ranks."""
    try:
        results = on_ranks(WORLD_SIZE, run, path)
    except SolutionFailed as failure:
        return [str(failure)]
    for number, capacity in enumerate(CAPACITIES):
        found = wrong_buckets(results[0]["buckets"][number], results[0]["expected_buckets"][number], capacity)
        if found:
            return [found]
    found = wrong_gradients(results)
    return [found] if found else []


def wrong_buckets(buckets: object, expected: list[list[str]], capacity: int) -> str | None:
    if buckets == expected:
        return None
    title = "the buckets are not those of DDP"
    if not isinstance(buckets, list) or not all(isinstance(bucket, list) for bucket in buckets):
        title = "fill_buckets returns a list of buckets, each a list of parameters"
    else:
        inside = [name for bucket in buckets for name in bucket]
        if [] in buckets:
            title = "there is an empty bucket"
        elif set(inside) < set(SIZES):
            missing = ", ".join(sorted(set(SIZES) - set(inside)))
            title = f"{missing} is in no bucket, so its gradient would never travel: the last bucket may be short"
        elif len(inside) > len(set(inside)):
            title = "a parameter is in two buckets"
        elif inside == list(SIZES):
            title = (
                "the buckets begin with the first layer, whose gradient backward computes last: then none is full"
                " before backward ends. Fill them from the last parameter to the first"
            )
        elif inside == list(SIZES)[::-1]:
            title = "a bucket is closed at another place: close it when it holds at least the capacity, in bytes"
    sizes = ", ".join(f"{name} {8 * size}" for name, size in SIZES.items())
    return (
        f"capacity {capacity}: {title}\n    the parameters and their bytes: {sizes}"
        f"\n    yours: {buckets}\n    DDP's: {expected}"
    )


def wrong_gradients(results: list[dict]) -> str | None:
    after = [result["after"] for result in results]
    own = [result["own"] for result in results]
    mean = results[0]["expected"]
    messages = [result["messages"] for result in results]
    if results[0]["not_waited"]:
        title = "average_bucket has returned while its all-reduce was under way: wait for the handle"
    elif messages != [1] * WORLD_SIZE:
        title = f"a bucket of {len(SIZES)} gradients is one message, so that its latency is paid once; the messages of"
        return side_by_side(f"{title} average_bucket:", messages, they_should_be=1)
    else:
        if near(after, [mean] * WORLD_SIZE):
            return None
        total = [[WORLD_SIZE * number for number in of_one] for of_one in mean]
        known = mistake(
            after,
            {
                "they are the sums over the ranks: divide by the world size": [total] * WORLD_SIZE,
                "they are each rank's own: put the means from the message back to where the gradients are": own,
            },
        )
        in_place = [name for name, found, right in zip(SIZES, after[0], mean, strict=True) if near(found, right)]
        if known is None and in_place:
            known = (
                f"only {', '.join(in_place)} has its own part of the message: the next parameter's part begins where"
                " the one before it ends"
            )
        title = "the gradients in the bucket are not the means over the ranks"
        title = f"{title}; {known}" if known else title
    return side_by_side(f"{title}; the gradients of a, b, c, d and e:", after, they_should_be=mean)
