"""The checker of `loss_scaler`: which gradients a step is made with, on which ranks, and how the scale goes on."""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import SGD

from common.exercises.compare import agreed, flat, mistake, near, numbers_in, plain, scaled, shown, side_by_side
from common.exercises.handles import all_waited_for
from common.exercises.stage import Place, SolutionFailed, in_rounds, load_name, on_ranks

MINUTES = 25
READ = "03_accelerate/MIXED_PRECISION.md"
SAME_AS = "torch's ShardedGradScaler, and of its GradScaler on one device that has all parameters"
WORLD_SIZES = (2, 3)
SETTINGS: tuple[dict[str, Any], ...] = (
    {"scale": 1024.0, "growth_interval": 2},
    {"scale": 513.0, "growth_interval": 3},  # odd: // would be seen
)
ORDINALS = {2: "second", 3: "third"}
# A parameter is multiplied by its factor twice, so its gradient is the factor's square.
SMALL = 2.0**-13  # the gradient is 1.5e-8, which is 0 in fp16
LARGE = 16.0  # the gradient is 256, which times 1024, 513 or 256.5 is inf in fp16
STEPS = 9  # the last four without an overflow, in which the scale doubles twice if two in a row double it
# The parameters of each rank's part, of two numbers each. The first of them is a group of the optimizer, and the others
# are another one.
PARAMETERS = (2, 3, 2)
# Of an overflow, by step: the number of the rank, counted from the last one, and the factor. It is in the second
# parameter of that rank, which is of the second group, and on rank 1 neither the first nor the last. An overflow
# follows one step or two without.
OVERFLOWS = {1: (-1, LARGE), 4: (-2, math.nan)}
LEARNING_RATE = 2.0**24  # which moves a weight with a small gradient by a quarter
MOMENTUM = 0.5  # by which a step with zeros for gradients still moves the weights
FOR_ALL = (
    "no rank sees the others' gradients, so in every step all ranks have to call an all-reduce of whether one of their"
    " own has overflowed"
)


def loss_of(parameters: Sequence[nn.Parameter], rank: int, step: int) -> torch.Tensor:
    """A loss that is computed in fp16 up to its last sum, as under autocast."""
    factors = torch.full((len(parameters), 2), SMALL).half()
    if step in OVERFLOWS and OVERFLOWS[step][0] % dist.get_world_size() == rank:
        factors[1, 1] = OVERFLOWS[step][1]
    products = torch.stack(list(parameters)).half() * factors * factors
    return 1 + products.float().sum()


def optimizer_of(parts: Sequence[list[nn.Parameter]]) -> SGD:
    groups: list[dict] = [{"params": [part[0] for part in parts]}, {"params": flat(part[1:] for part in parts)}]
    return SGD(groups, lr=LEARNING_RATE, momentum=MOMENTUM)


def trained(scaler: Any, ranks: Sequence[int]) -> list[dict]:
    """For each step: the loss, the gradients of each call of the optimizer's step, the weights and the scale after it.

    Args:
        ranks: those whose parts are trained here, by one optimizer.
    """
    parts = []
    for rank in ranks:
        parts.append([nn.Parameter(torch.ones(2)) for _ in range(PARAMETERS[rank])])
    optimizer = optimizer_of(parts)
    stepped_with: list[list] = []

    def note_gradients(*_: Any) -> None:
        stepped_with.append([[plain(parameter.grad) for parameter in part] for part in parts])

    optimizer.register_step_pre_hook(note_gradients)
    steps = []
    for step in range(STEPS):
        losses = [loss_of(part, rank, step) for part, rank in zip(parts, ranks, strict=True)]
        loss = torch.stack(losses).sum()
        before = plain(loss)
        scaled_loss = scaler.scale(loss)
        if not isinstance(scaled_loss, torch.Tensor):
            raise SolutionFailed(f"scale(loss) returned {plain(scaled_loss)}: return the loss times the scale")
        scaled_loss.backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        steps.append(
            {
                "loss": before,
                "scaled": plain(scaled_loss),
                "stepped_with": list(stepped_with),
                "weights": plain(parts),
                "scale": plain(scaler.get_scale()),
            }
        )
        stepped_with.clear()
    return steps


def of_part(steps: list[dict], number: int) -> list[list]:
    """For each step: the gradients of one part (None if the step was skipped), its weights, and the scale."""
    found = []
    for step in steps:
        gradients = step["stepped_with"][0][number] if step["stepped_with"] else None
        found.append([gradients, step["weights"][number], step["scale"]])
    return found


def run(path: str, scale: float, growth_interval: int) -> dict:
    """On one rank: what the solution did in each step, and what is right."""
    rank = dist.get_rank()
    everybody = range(dist.get_world_size())
    on_one_device = trained(GradScaler("cpu", scale, growth_interval=growth_interval), everybody)
    shared_out = trained(ShardedGradScaler("cpu", scale, growth_interval=growth_interval), [rank])
    expected = agreed(one_device=of_part(on_one_device, rank), real=of_part(shared_out, 0))
    with all_waited_for():
        scaler = load_name(path, "LossScaler")(scale=scale, growth_interval=growth_interval)
        steps = trained(scaler, [rank])
    return {"steps": steps, "expected": expected}


def check(path: Path) -> list[str]:
    """Eight steps on two ranks and on three, of which one overflows on the last rank and another on the one before."""

    def on(world_size: int) -> list[str]:
        for settings in SETTINGS:
            results = on_ranks(world_size, partial(run, **settings), path, why_it_hangs)
            found = wrong_steps(results, **settings)
            if found:
                named = " and ".join(f"{name}={value}" for name, value in settings.items())
                return [f"with {named}, {found}"]
        return []

    return in_rounds(WORLD_SIZES, on)


def wrong_steps(results: list[dict], scale: float, growth_interval: int) -> str | None:
    """A finding about the first step in which something is wrong."""
    for number in range(STEPS):
        steps = [result["steps"][number] for result in results]
        gradients = [result["expected"][number][0] for result in results]
        weights = [result["expected"][number][1] for result in results]
        next_scale = results[0]["expected"][number][2]
        if gradients == [None] * len(results):
            found = wrong_loss(steps, scale) or wrong_skip(steps, number)
        else:
            found = wrong_loss(steps, scale) or wrong_step(steps, gradients, scale)
        found = found or wrong_weights(steps, weights) or wrong_scale(steps, next_scale, scale, growth_interval)
        if found:
            return f"in step {number + 1} {found}"
        scale = next_scale
    return None


def why_it_hangs(places: Sequence[Place | None]) -> str:
    return (
        "in each step all ranks call the same collectives, although their parts have unequal numbers of parameters,"
        f" {shown(list(PARAMETERS[: len(places)]))}: one all-reduce, after the loop over them"
    )


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
    made = [step["stepped_with"][0][0] if step["stepped_with"] else None for step in steps]
    from_the_last, factor = OVERFLOWS[number]
    overflowed = from_the_last % len(steps)
    numbers = [number for number in numbers_in(made[overflowed]) if number is not None]
    overflows = [number for number in numbers if not math.isfinite(number)]
    if overflowed not in stepped:
        title = (
            f"rank {overflowed} skipped the step, because a gradient of its part overflowed, and rank {stepped[0]} made"
            f" it: one part of the network has moved, and the other has not. {FOR_ALL.capitalize()}"
        )
    elif not overflows:
        title = (
            "optimizer.step() was called with other numbers in place of inf or nan, or with none, and the optimizer's"
            " momentum moves the weights even for zeros: leave out the call"
        )
    elif math.isnan(factor):
        title = f"rank {overflowed} made the step with a gradient that is nan: inf is not the only sign of an overflow"
    else:
        title = (
            f"rank {overflowed} made the step, although a gradient of its part had overflowed: look at all gradients,"
            " for inf and for nan (the loss itself may be finite), let an overflow on one rank count for all, and call"
            " optimizer.step() only if there is none"
        )
    return side_by_side(f"{title}; the gradients with which each rank made the step (None: skipped):", made)


def wrong_step(steps: list[dict], gradients: list, scale: float) -> str | None:
    """A finding about a step that all ranks have to make."""
    calls = [len(step["stepped_with"]) for step in steps]
    if calls != [1] * len(steps):
        title = "optimizer.step() has to be called once on each rank, because no gradient is inf or nan; its calls:"
        return side_by_side(title, calls, they_should_be=1)
    made = [step["stepped_with"][0][0] for step in steps]
    if near(made, gradients):
        return None
    known = mistake(
        made,
        {
            "they are still multiplied by the scale: divide them by it before the step": scaled(gradients, scale),
            "those of the second group in optimizer.param_groups are still multiplied by the scale": [
                [of_part[0], *scaled(of_part[1:], scale)] for of_part in gradients
            ],
        },
    )
    title = "the gradients with which each rank made the step are not the true ones"
    return side_by_side(f"{title}; {known}:" if known else f"{title}:", made, they_should_be=gradients)


def wrong_weights(steps: list[dict], weights: list) -> str | None:
    """A finding about weights that somebody else than the optimizer has changed."""
    after = [step["weights"][0] for step in steps]
    if near(after, weights):
        return None
    title = "the weights are not those that optimizer.step() makes of right gradients; the weights after the step:"
    return side_by_side(title, after, they_should_be=weights)


def wrong_scale(steps: list[dict], expected: float, before: float, growth_interval: int) -> str | None:
    """A finding about the scale after update()."""
    scales = [step["scale"] for step in steps]
    if near(scales, [expected] * len(steps)):
        return None
    doubles = (
        f"the {ORDINALS[growth_interval]} step in a row without an overflow (growth_interval={growth_interval}) doubles"
        " the scale"
    )
    if not all(near(scale, scales[0]) for scale in scales):
        title = f"the ranks have different scales after the step: {FOR_ALL}"
    elif expected < before:
        title = "an overflow on any rank halves the scale of all ranks"
    elif expected > before:
        title = f"{doubles}, and then they are counted anew"
    else:
        title = (
            "the scale stays: the steps in a row are counted anew after an overflow, and after the scale was doubled;"
            f" {doubles}"
        )
    return side_by_side(f"{title}; the scale after update():", scales, before=before, it_should_be=expected)
