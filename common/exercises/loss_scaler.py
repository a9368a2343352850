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
WHY_IT_HANGS = (
    "no rank sees the others' gradients, so in every step all ranks have to call one all-reduce, after the loop over"
    " their parameters, of whether one of their own has overflowed"
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
    """For each step: the loss, the gradients of each call of the optimizer's step, and the scale after it."""
    parameters: list[torch.Tensor] = [nn.Parameter(torch.ones(2)) for _ in range(PARAMETERS[dist.get_rank()])]
    groups: list[dict] = [{"params": parameters[:1]}, {"params": parameters[1:]}]
    optimizer = SGD(groups, lr=1.0)
    stepped_with: list[list] = []

    def note_gradients(*_: Any) -> None:
        stepped_with.append([plain(parameter.grad) for parameter in parameters])

    optimizer.register_step_pre_hook(note_gradients)
    steps = []
    for step in range(STEPS):
        loss = loss_of(parameters, step)
        scaled_loss = scaler.scale(loss)
        scaled_loss.backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        steps.append(
            {
                "loss": plain(loss),
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
    for number in range(STEPS):
        steps = [result["steps"][number] for result in results]
        expected = [result["expected"][number] for result in results]
        if number in OVERFLOWS:
            found = wrong_skip(steps, number)
        else:
            found = wrong_loss(steps, scale) or wrong_step(steps, expected, scale)
        found = found or wrong_scale(steps, expected[0]["scale"], scale)
        if found:
            return f"in step {number + 1} {found}"
        scale = expected[0]["scale"]
    return None


def wrong_loss(steps: list[dict], scale: float) -> str | None:
    """A finding about the number with which backward began."""
    returned = [step["scaled"] for step in steps]
    losses = [step["loss"] for step in steps]
    if near(returned, scaled(losses, scale)):
        return None
    title = "scale(loss) did not return the loss times the scale"
    if near(returned, losses):
        title = f"{title}, but the loss: in fp16 a gradient of 1.5e-8 is then 0, and its weight never moves"
    return side_by_side(f"{title}; it returned:", returned, the_losses=losses, the_scale=scale)


def wrong_skip(steps: list[dict], number: int) -> str | None:
    """A finding about a step in which a gradient of one rank is inf or nan."""
    stepped = [rank for rank, step in enumerate(steps) if step["stepped_with"]]
    if not stepped:
        return None
    from_the_last, factor = OVERFLOWS[number]
    overflowed = from_the_last % len(steps)
    made = [step["stepped_with"] for step in steps]
    title = (
        f"rank {overflowed} made the step, although a gradient of its part had overflowed: look at all gradients, for"
        " inf and for nan (the loss itself may be finite), let an overflow on one rank count for all, and call"
        " optimizer.step() only if there is none (even with zeros for gradients, momentum moves the weights)"
    )
    if overflowed not in stepped:
        title = (
            f"rank {overflowed} skipped the step, because a gradient of its part overflowed, and rank {stepped[0]} made"
            f" it: one part of the network has moved, and the other has not; {WHY_IT_HANGS}"
        )
    elif math.isnan(factor):
        title = f"rank {overflowed} made the step with a gradient that is nan: inf is not the only sign of an overflow"
    return side_by_side(f"{title}; the gradients of each rank's calls of optimizer.step():", made)


def wrong_step(steps: list[dict], expected: list[dict], scale: float) -> str | None:
    """A finding about a step that all ranks have to make."""
    calls = [len(step["stepped_with"]) for step in steps]
    if calls != [1] * len(steps):
        title = "optimizer.step() has to be called once on each rank, because no gradient is inf or nan; its calls:"
        return side_by_side(title, calls, they_should_be=1)
    made = [step["stepped_with"][0] for step in steps]
    gradients = [step["stepped_with"][0] for step in expected]
    if near(made, gradients):
        return None
    title = "the gradients with which each rank made the step are not the true ones"
    if near(made, scaled(gradients, scale)):
        title = f"{title}; they are still multiplied by the scale: divide them by it before the step"
    elif near([of_rank[0] for of_rank in made], [of_rank[0] for of_rank in gradients]):
        title = f"{title}; only those of the first group in optimizer.param_groups are: divide those of all groups"
    return side_by_side(f"{title}:", made, they_should_be=gradients)


def wrong_scale(steps: list[dict], expected: float, before: float) -> str | None:
    """A finding about the scale after update()."""
    scales = [step["scale"] for step in steps]
    if near(scales, [expected] * len(steps)):
        return None
    if not near(scales, scales[:1] * len(steps)):
        title = f"the ranks have different scales after the step: {WHY_IT_HANGS}"
    elif expected < before:
        title = "an overflow on any rank halves the scale of all ranks"
    else:
        title = (
            "the scale doubles after growth_interval steps in a row without an overflow, which are counted anew after"
            " an overflow and after each doubling"
        )
    return side_by_side(f"{title}; the scale after update():", scales, before=before, it_should_be=expected)
