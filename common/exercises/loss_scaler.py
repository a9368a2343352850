"""The checker of `loss_scaler`: which gradients a step is made with, on which ranks, and how the scale goes on."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import SGD

from common.exercises.compare import near, plain, scaled, side_by_side
from common.exercises.stage import load_name
from common.exercises.traffic import observed

MINUTES = 25
READ = "03_accelerate/MIXED_PRECISION.md"
SAME_AS = "torch's ShardedGradScaler"
WORLD_SIZES = (2, 3)
SCALE = 513.0  # odd: // would be seen
GROWTH_INTERVAL = 2
# A parameter is multiplied by its factor twice, so its gradient is the factor's square.
SMALL = 2.0**-13  # the gradient is 1.5e-8, which is 0 in fp16
LARGE = 16.0  # the gradient is 256, which times 513 or 256.5 is inf in fp16
STEPS = 9  # the last four without an overflow, in which the scale doubles twice if two in a row double it
# The parameters of each rank's part, of two numbers each. The first of them is a group of the optimizer, and the others
# are another one.
PARAMETERS = (2, 3, 2)
# Of an overflow, by step: the number of the rank, counted from the last one, and the factor. It is in the second
# parameter of that rank, which is of the second group, and on rank 1 neither the first nor the last.
OVERFLOWS = {1: (-1, LARGE), 4: (-2, math.nan)}
# What is compared in each step, and what the task says about it.
RULES = {
    "scaled": (
        "scale(loss) has to return the loss times the scale, or in fp16 a gradient of 1.5e-8 is 0, and its weight never"
        " moves; it returned:"
    ),
    "stepped_with": (
        "optimizer.step() has to be called once on each rank, with gradients that are divided by the scale, those of"
        " all optimizer.param_groups; the gradients of each rank's calls:"
    ),
    "scale": (
        "an overflow on any rank halves the scale of all ranks, and growth_interval steps in a row without one, counted"
        " anew after each change, double it; the scale after update():"
    ),
}
SKIP = (
    "a gradient of rank {} had overflowed, so all ranks have to skip the step: look for inf and for nan in all"
    " gradients, and call one all-reduce in each step, after the loop over the parameters, of whether one was found;"
    " the gradients of each rank's calls of optimizer.step():"
)


def loss_of(parameters: list[torch.Tensor], step: int) -> torch.Tensor:
    """A loss that is computed in fp16 up to its last sum, as under autocast."""
    factors = torch.full((len(parameters), 2), SMALL).half()
    from_the_last, factor = OVERFLOWS.get(step, (0, SMALL))
    if step in OVERFLOWS and from_the_last % dist.get_world_size() == dist.get_rank():
        factors[1, 1] = factor
    products = torch.stack(parameters).half() * factors * factors
    return 1 + products.float().sum()


def trained(scaler: Any) -> list[dict]:
    """For each step: the scaled loss, the gradients of each call of the optimizer's step, and the scale after it."""
    parameters: list[torch.Tensor] = [nn.Parameter(torch.ones(2)) for _ in range(PARAMETERS[dist.get_rank()])]
    groups: list[dict] = [{"params": parameters[:1]}, {"params": parameters[1:]}]
    optimizer = SGD(groups, lr=1.0)
    stepped_with: list[list] = []

    def note_gradients(*_: Any) -> None:
        stepped_with.append([plain(parameter.grad) for parameter in parameters])

    optimizer.register_step_pre_hook(note_gradients)
    steps = []
    for step in range(STEPS):
        scaled_loss = scaler.scale(loss_of(parameters, step))
        scaled_loss.backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        steps.append(
            {
                "scaled": plain(scaled_loss),
                "stepped_with": list(stepped_with),
                "scale": plain(scaler.get_scale()),
            }
        )
        stepped_with.clear()
    return steps


def run(path: str) -> dict:
    """On one rank: what the solution did in each step, and what is right."""
    expected = trained(ShardedGradScaler("cpu", SCALE, growth_interval=GROWTH_INTERVAL))
    with observed():
        steps = trained(load_name(path, "LossScaler")(scale=SCALE, growth_interval=GROWTH_INTERVAL))
    return {"steps": steps, "expected": expected}


def finding(results: list[dict]) -> str | None:
    """What is wrong in the first step in which something is."""
    scale = SCALE
    for step in range(STEPS):
        for fact, rule in RULES.items():
            made = [result["steps"][step][fact] for result in results]
            expected = [result["expected"][step][fact] for result in results]
            if near(made, expected):
                continue
            title = rule
            if fact == "stepped_with" and step in OVERFLOWS:
                from_the_last, _ = OVERFLOWS[step]
                title = SKIP.format(from_the_last % len(results))
            elif fact == "stepped_with" and near(made, scaled(expected, scale)):
                title = "the gradients are still multiplied by the scale: divide them by it before the step:"
            return side_by_side(f"in step {step + 1} {title}", made, they_should_be=expected)
        scale = results[0]["expected"][step]["scale"]
    return None
