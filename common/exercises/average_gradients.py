"""The checker of `average_gradients`: which number each rank has as its gradient, and how it came about."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.exercises.compare import (
    agreed,
    exactly,
    in_one_row,
    mistake,
    near,
    plain,
    scaled,
    side_by_side,
)
from common.exercises.link import CHANGED_TOO_EARLY, slow_link
from common.exercises.stage import in_rounds, load_name, on_ranks
from common.small.ddp.naive import NaiveDDP

MINUTES = 10
READ = "02_ddp_raw/README.md"
SAME_AS = "NaiveDDP (common/small/ddp/naive.py) and torch's DistributedDataParallel"
# The gradients of the biases, by rank. On two and on three ranks no rank's own is the mean, nor the sum divided twice,
# and the mean is no whole number.
FIRST = (1.0, 3.2, 8.0)
LAST = (0.0, 2.2, 7.0)  # a gradient of zeros counts in the mean too
USED = ("first.weight", "first.bias", "last.weight", "last.bias")


class ThreeLayers(nn.Module):
    """Two layers that are used, and between them one that takes no part in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 1)
        self.unused = nn.Linear(2, 1)
        self.last = nn.Linear(2, 1)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        rank = dist.get_rank()
        return FIRST[rank] * self.first(values) + LAST[rank] * self.last(values)


def network() -> ThreeLayers:
    torch.manual_seed(0)
    return ThreeLayers().double()


def backward(model: nn.Module) -> None:
    model(torch.tensor([1.0, 10.0]).double()).sum().backward()


def gradients(model: nn.Module) -> dict[str, list | None]:
    """The gradient of each parameter as a list of numbers; None where there is none."""
    return {name: in_one_row(parameter.grad) for name, parameter in model.named_parameters()}


def averaged_by_torch() -> list:
    model = DistributedDataParallel(network(), find_unused_parameters=True)
    backward(model)
    return list(gradients(model).values())


def averaged_by_the_small_one() -> list:
    model = NaiveDDP(network())
    backward(model)
    model.average_gradients()
    return list(gradients(model).values())


def run(path: str) -> dict:
    """On one rank: the gradients before and after the solution was called, and those that are right."""
    expected = agreed(real=averaged_by_torch(), small=averaged_by_the_small_one())
    model = network()
    backward(model)
    own = gradients(model)
    weights = model.first.weight.detach().clone()
    with slow_link() as link:
        average_gradients = load_name(path, "average_gradients")
        average_gradients(model)
    return {
        "own": own,
        "after": gradients(model),
        "expected": dict(zip(own, expected, strict=True)),
        "weights": plain(weights),
        "weights_after": plain(model.first.weight),
        "not_waited": sum(message.times_waited == 0 for message in link.messages),
        "was_changed": any(message.was_changed for message in link.messages),
    }


def check(path: Path) -> list[str]:
    """On two and on three ranks."""

    def on(world_size: int) -> list[str]:
        found = findings(on_ranks(world_size, run, path))
        return [f"on {world_size} ranks {finding}" for finding in found]

    return in_rounds((2, 3), on)


def findings(results: list[dict]) -> list[str]:
    weights = [result["weights_after"] for result in results]
    if not all(near(of_rank, results[0]["weights"]) for of_rank in weights):
        title = "the weights have changed; only the gradients are to be averaged"
        return [side_by_side(title, weights, before=results[0]["weights"])]
    if any(result["was_changed"] for result in results):
        return [f"a gradient {CHANGED_TOO_EARLY}"]
    for name in USED:
        after = [result["after"][name] for result in results]
        expected = [result["expected"][name] for result in results]
        if not is_right(name, results):
            what = f"the gradient of {name} {wrong_gradient(name, results)}"
            own = [result["own"][name] for result in results]
            return [side_by_side(what, after, the_ranks_had=own, their_mean=expected[0])]
    unused = [result["after"]["unused.weight"] for result in results]
    if any(gradient is not None for gradient in unused):
        title = "the unused layer has got a gradient: with weight decay or momentum it would now move"
        return [side_by_side(title, unused, it_should_stay=None)]
    return []


def is_right(name: str, results: list[dict]) -> bool:
    return all(exactly(result["after"][name], result["expected"][name]) for result in results)


def wrong_gradient(name: str, results: list[dict]) -> str:
    """The mistake that has led to these gradients of one parameter."""
    if results[0]["not_waited"]:
        return "is not there yet: all_reduce with async_op=True returns a handle at once; call its wait() for the sum"
    world_size = len(results)
    own = [result["own"][name] for result in results]
    mean = results[0]["expected"][name]
    after = [result["after"][name] for result in results]
    if name == "last.weight" and near(after, own):
        return "is still each rank's own: pass over the unused layer's None, and go on with the parameter after it"
    total = scaled(mean, world_size)
    known = mistake(
        after,
        {
            "is the sum over the ranks: divide it by the world size, in `parameter.grad` itself": [total] * world_size,
            "is still each rank's own: the sum of all ranks' has to be written into `parameter.grad`": own,
            "is rank 0's on every rank: copied, and not averaged": [own[0]] * world_size,
            "is divided by 2 however many ranks there are: take the world size": [scaled(total, 1 / 2)] * world_size,
            "is divided by the world size, but not added up over the ranks: all_reduce has to be given `parameter.grad`"
            " itself, into which it writes the sum": scaled(own, 1 / world_size),
            "is divided by the world size twice": [scaled(mean, 1 / world_size)] * world_size,
        },
    )
    if known:
        return known
    return "is not the mean over the ranks, which is the sum over them, divided once by the world size"
