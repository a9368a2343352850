"""The checker of `average_gradients`: which number each rank has as its gradient, and how it came about."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.ladder.exercises.compare import agreed, mistake, near, plain, side_by_side
from common.ladder.exercises.stage import SolutionFailed, load_name, on_ranks
from common.small.ddp.naive import NaiveDDP

MINUTES = 10
READ = "02_ddp_raw/README.md"
SAME_AS = "NaiveDDP (common/small/ddp/naive.py) and torch's DistributedDataParallel"
GRADIENTS = (1.0, 2.0, 6.0)  # of the bias, by rank: on two and on three ranks no rank's own is the mean


class TwoLayers(nn.Module):
    """A layer that is used, and one that takes no part in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(2, 1)
        self.unused = nn.Linear(2, 1)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.used(values)


def network() -> TwoLayers:
    torch.manual_seed(0)
    return TwoLayers().double()


def backward(model: nn.Module) -> None:
    values = torch.tensor([1.0, 10.0]).double()
    (GRADIENTS[dist.get_rank()] * model(values).sum()).backward()


def gradients(model: nn.Module) -> dict[str, list | None]:
    """The gradient of each parameter as a list of numbers; None where there is none."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = None if parameter.grad is None else plain(parameter.grad.flatten())
    return found


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
    average_gradients = load_name(path, "average_gradients")
    model = network()
    backward(model)
    own = gradients(model)
    weights = model.used.weight.detach().clone()
    average_gradients(model)
    return {
        "own": own,
        "after": gradients(model),
        "expected": dict(zip(own, expected, strict=True)),
        "weights": plain(weights),
        "weights_after": plain(model.used.weight),
    }


def check(path: Path) -> list[str]:
    """On two and on three ranks, so that a fixed number in place of the world size is seen."""
    for world_size in (2, 3):
        try:
            results = on_ranks(world_size, run, path)
        except SolutionFailed as failure:
            return [str(failure)]
        found = findings(results)
        if found:
            return [f"on {world_size} ranks {finding}" for finding in found]
    return []


def findings(results: list[dict]) -> list[str]:
    weights = [result["weights_after"] for result in results]
    if not all(near(of_rank, results[0]["weights"]) for of_rank in weights):
        title = "the weights have changed; only the gradients are to be averaged"
        return [side_by_side(title, weights, before=results[0]["weights"])]
    for name in ("used.weight", "used.bias"):
        after = [result["after"][name] for result in results]
        expected = [result["expected"][name] for result in results]
        if not near(after, expected):
            what = f"the gradient of {name} {wrong_gradient(name, results)}"
            own = [result["own"][name] for result in results]
            return [side_by_side(what, after, the_ranks_had=own, their_mean=expected[0])]
    unused = [result["after"]["unused.weight"] for result in results]
    if any(gradient is not None for gradient in unused):
        title = "the unused layer has got a gradient: with weight decay or momentum it would now move"
        return [side_by_side(title, unused, it_should_stay=None)]
    return []


def wrong_gradient(name: str, results: list[dict]) -> str:
    """The mistake that has led to these gradients of one parameter."""
    world_size = len(results)
    own = [result["own"][name] for result in results]
    mean = results[0]["expected"][name]
    after = [result["after"][name] for result in results]
    known = mistake(
        after,
        {
            "is the sum over the ranks: divide it by the world size": [[world_size * x for x in mean]] * world_size,
            "is still each rank's own: the sum of all ranks' has to be written into `parameter.grad`": own,
            "is rank 0's on every rank: copied, and not averaged": [own[0]] * world_size,
            "is divided by 2 however many ranks there are: take the world size": [[world_size * x / 2 for x in mean]]
            * world_size,
            "is divided by the world size, but not added up over the ranks": [
                [x / world_size for x in of_rank] for of_rank in own
            ],
            "is divided by the world size twice": [[x / world_size for x in mean]] * world_size,
            "is gone": [None] * world_size,
        },
    )
    if known:
        return known
    right = [str(rank) for rank, gradient in enumerate(after) if near(gradient, mean)]
    if right:
        return f"is the mean on rank {', '.join(right)} only: the other ranks need it too"
    return "is not the mean over the ranks"
