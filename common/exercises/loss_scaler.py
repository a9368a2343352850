"""The checker of `loss_scaler`: which gradients a step is made with, on which ranks, and how the scale goes on.

step             1     2       3    4     5       6    7     8     9
overflow               rank 1             rank 0
scale after it   1024  512     512  1024  512     512  1024  1024  2048
"""

import math
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import SGD

from common.exercises.compare import Mistake, as_numbers, by_rank, gradients, near
from common.exercises.traffic import Traffic

SCALE = 1024.0
GROWTH_INTERVAL = 2
STEPS = 9
# A parameter is multiplied by its factor twice, so its gradient is the factor's square.
SMALL = 2.0**-13  # the gradient is 1.5e-8, which is 0 in fp16
LARGE = 16.0  # the gradient is 256, which times the scale is inf in fp16
# Parameters of each rank's part. Rank 1 has three, so that code which looks at the first or the last only is caught.
PARAMETERS = (2, 3, 2)


class Overflow(NamedTuple):
    """The rank on which the gradient of the second parameter becomes inf or nan, and the factor that makes it so."""

    rank: int
    factor: float


OVERFLOWS_BY_STEP = {2: Overflow(rank=1, factor=LARGE), 5: Overflow(rank=0, factor=math.nan)}


def loss_of(parameters: list[torch.Tensor], step: int) -> torch.Tensor:
    """A loss that is computed in fp16 up to its last sum, as under autocast."""
    factors = torch.full((len(parameters), 2), SMALL).half()
    overflow = OVERFLOWS_BY_STEP.get(step)
    if overflow is not None and overflow.rank == dist.get_rank():
        factors[1, 1] = overflow.factor
    products = torch.stack(parameters).half() * factors * factors
    return 1 + products.float().sum()


class Step(NamedTuple):
    """The scaled loss, the gradients of each call of the optimizer's step, and the scale after it."""

    scaled_loss: Any
    gradients: list
    scale: Any


def steps_with(scaler: Any) -> list[Step]:
    parameters = nn.ParameterList([torch.ones(2) for _ in range(PARAMETERS[dist.get_rank()])])
    first, *others = parameters
    optimizer = SGD([{"params": [first]}, {"params": others}], lr=1.0)
    calls: list[list] = []  # the gradients at each call of the optimizer's step
    optimizer.register_step_pre_hook(lambda *_: calls.append(gradients(parameters)))
    steps = []
    for number in range(1, STEPS + 1):
        calls.clear()
        scaled_loss = scaler.scale(loss_of(list(parameters), number))
        scaled_loss.backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        steps.append(Step(as_numbers(scaled_loss), list(calls), as_numbers(scaler.get_scale())))
    return steps


def reference() -> list[Step]:
    return steps_with(ShardedGradScaler("cpu", SCALE, growth_interval=GROWTH_INTERVAL))


def attempt(solution: ModuleType, _: Traffic) -> list[Step]:
    return steps_with(solution.LossScaler(scale=SCALE, growth_interval=GROWTH_INTERVAL))


def check(actual: list[list[Step]], expected: list[list[Step]]) -> None:
    """Raise the first mistake of the first step that has one."""
    for number in range(1, STEPS + 1):
        for part in Step._fields:
            found = [getattr(steps[number - 1], part) for steps in actual]
            right = [getattr(steps[number - 1], part) for steps in expected]
            if not near(found, right):
                sentence = explanation(number, part, found, right)
                raise Mistake(f"step {number}: {sentence}", by_rank(found) | {"they should be": right})


def explanation(number: int, part: str, found: list, right: list) -> str:
    """The sentence about a part of a step that is not right on all ranks."""
    overflow = OVERFLOWS_BY_STEP.get(number)
    if part == "scaled_loss":
        return "scale(loss) has to return the loss times the scale"
    if part == "scale":
        if overflow is not None:
            return "an overflow on any rank halves the scale of all ranks"
        return "growth_interval steps in a row without an overflow double the scale. Then count anew"
    if overflow is not None:
        return (
            f"a gradient had overflowed on rank {overflow.rank}, so all ranks have to skip the step. Look for "
            "inf and nan in all gradients, and call one all-reduce in each step, after the loop over the parameters"
        )
    if near(found, right, times=SCALE):  # before the first overflow the scale is still SCALE
        return "the gradients are still multiplied by the scale. Divide those of all param_groups before the step"
    if list(map(len, found)) != list(map(len, right)):
        return "call optimizer.step() once on each rank"
    return "these are not the gradients of the loss. Divide those of all param_groups by the scale, once"
