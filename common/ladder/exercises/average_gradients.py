"""Average the gradients by hand.

You have a network on every rank, with the same weights. Each rank has called backward on a loss of its own. Write

    def average_gradients(model: torch.nn.Module) -> None: ...

After it, the gradient of every parameter is the mean of the ranks' gradients, on all ranks. Use `torch.distributed`;
the process group is there. A parameter that took no part in the loss has no gradient: leave it alone.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from common.ladder.exercises.stage import SolutionFailed, function_in, on_ranks, process_group


class TwoLayers(nn.Module):
    """A used layer, and one that takes no part in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(3, 2)
        self.unused = nn.Linear(3, 2)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.used(values)


def run(path: str) -> dict:
    """On one rank: gradients and weights before and after the solution was called."""
    solution = function_in(path, "average_gradients")
    with process_group():
        torch.manual_seed(0)
        model = TwoLayers().double()
        values = torch.randn(4, 3, generator=torch.Generator().manual_seed(dist.get_rank())).double()
        model(values).pow(2).sum().backward()
        weights = model.used.weight.detach().clone()
        before = model.used.weight.grad.clone()
        solution(model)
        return {
            "own": before,
            "after": model.used.weight.grad,
            "bias": model.used.bias.grad,
            "unused": model.unused.weight.grad,
            "weights_moved": not torch.equal(weights, model.used.weight),
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
            return [f"on {world_size} ranks: {finding}" for finding in found]
    return []


def findings(results: list[dict]) -> list[str]:
    total = sum(result["own"] for result in results)
    mean = total / len(results)
    found = []
    if any(result["weights_moved"] for result in results):
        found.append("the weights have changed; only gradients are to be averaged")
    for rank, result in enumerate(results):
        after = result["after"]
        if after is None:
            found.append(f"rank {rank} has no gradient any more")
        elif torch.allclose(after, mean):
            continue
        elif torch.allclose(after, total):
            found.append(f"rank {rank} has the sum of the gradients: divide by the world size")
        elif torch.allclose(after, result["own"]):
            found.append(f"rank {rank} still has its own gradient")
        else:
            found.append(f"the gradient on rank {rank} is not the mean")
    if not found and not all(torch.allclose(result["bias"], results[0]["bias"]) for result in results):
        found.append("the weight's gradients agree, the bias's do not: average every parameter")
    if any(result["unused"] is not None for result in results):
        found.append("the unused layer has got a gradient: with weight decay it would now move")
    return found
