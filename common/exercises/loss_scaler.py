"""The checker of `loss_scaler`: which gradients a step is made with, on which ranks, and how the scale goes on."""

import math
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import SGD

from common.exercises.compare import as_numbers, near, scaled
from common.exercises.mistake import Mistake, by_rank
from common.exercises.traffic import Traffic

SCALE = 1024.0
GROWTH_INTERVAL = 2
# A parameter is multiplied by its factor twice, so its gradient is the factor's square.
SMALL = 2.0**-13  # the gradient is 1.5e-8, which is 0 in fp16
LARGE = 16.0  # the gradient is 256, which times the scale is inf in fp16
STEPS = 9  # the last four without an overflow, in which the scale doubles twice if two in a row double it
PARAMETERS = (2, 3, 2)  # of each rank's part: on rank 1 the second parameter is neither the first nor the last
# By step: the rank on which the gradient of the second parameter becomes inf or nan, and the factor that makes it so.
OVERFLOWS = {1: (1, LARGE), 4: (0, math.nan)}


def loss_of(parameters: list[torch.Tensor], step: int) -> torch.Tensor:
    """A loss that is computed in fp16 up to its last sum, as under autocast."""
    factors = torch.full((len(parameters), 2), SMALL).half()
    rank, factor = OVERFLOWS.get(step, (None, SMALL))
    if rank == dist.get_rank():
        factors[1, 1] = factor
    products = torch.stack(parameters).half() * factors * factors
    return 1 + products.float().sum()


class Step(NamedTuple):
    """The scaled loss, the gradients of each call of the optimizer's step, and the scale after it."""

    scaled_loss: Any
    gradients: list
    scale: Any


def steps_with(scaler: Any) -> list[Step]:
    parameters: list[torch.Tensor] = []
    for _ in range(PARAMETERS[dist.get_rank()]):
        parameters.append(nn.Parameter(torch.ones(2)))
    optimizer = SGD([{"params": parameters[:1]}, {"params": parameters[1:]}], lr=1.0)
    gradients: list[list] = []  # of each call in the present step

    def note_gradients(*_: Any) -> None:
        gradients.append([as_numbers(parameter.grad) for parameter in parameters])

    optimizer.register_step_pre_hook(note_gradients)
    steps = []
    for number in range(STEPS):
        gradients.clear()
        scaled_loss = scaler.scale(loss_of(parameters, number))
        scaled_loss.backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        steps.append(Step(as_numbers(scaled_loss), list(gradients), as_numbers(scaler.get_scale())))
    return steps


def reference() -> list[Step]:
    return steps_with(ShardedGradScaler("cpu", SCALE, growth_interval=GROWTH_INTERVAL))


def attempt(solution: ModuleType, _: Traffic) -> list[Step]:
    return steps_with(solution.LossScaler(scale=SCALE, growth_interval=GROWTH_INTERVAL))


def check(made: list[list[Step]], expected: list[list[Step]]) -> None:
    """Raise the first mistake of the first step that has one."""
    for number in range(STEPS):
        for field in Step._fields:
            of_ranks = [getattr(steps[number], field) for steps in made]
            right = [getattr(steps[number], field) for steps in expected]
            if not near(of_ranks, right):
                sentence = sentence_about(number, field, of_ranks, right)
                raise Mistake(f"step {number + 1}, {field}: {sentence}", by_rank(of_ranks) | {"they should be": right})


def sentence_about(step: int, field: str, of_ranks: list, right: list) -> str:
    if field == "scaled_loss":
        return "scale(loss) has to return the loss times the scale, or in fp16 a gradient of 1.5e-8 is 0"
    if field == "scale":
        return (
            "an overflow on any rank halves the scale of all ranks, and growth_interval steps in a row without one, "
            "counted anew after each change, double it"
        )
    if step in OVERFLOWS:
        rank, _ = OVERFLOWS[step]
        return (
            f"a gradient had overflowed on rank {rank}, so all ranks have to skip the step: look for inf and for nan "
            "in all gradients, and call one all-reduce in each step, after the loop over the parameters"
        )
    if near(of_ranks, scaled(right, SCALE)):  # no step before the first overflow has another scale
        return "they are still multiplied by the scale: divide all gradients of optimizer.param_groups before the step"
    return "call optimizer.step() once on each rank, and divide all gradients of optimizer.param_groups by the scale"
