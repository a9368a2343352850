"""The checker of `loss_scaler`: which gradients a step is made with, on which ranks, and how the scale goes on."""

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import SGD

from common.exercises.compare import at_step, near, plain, scaled
from common.exercises.exercise import Exercise
from common.exercises.mistake import Mistake
from common.exercises.stage import load_name
from common.exercises.traffic import observed

SCALE = 513.0  # odd: // would be seen
GROWTH_INTERVAL = 2
# A parameter is multiplied by its factor twice, so its gradient is the factor's square.
SMALL = 2.0**-13  # the gradient is 1.5e-8, which is 0 in fp16
LARGE = 16.0  # the gradient is 256, which times 513 or 256.5 is inf in fp16
STEPS = 9  # the last four without an overflow, in which the scale doubles twice if two in a row double it
# The parameters of each rank's part, of two numbers each. The first of them is a group of the optimizer, and the others
# are another one.
PARAMETERS = (2, 3, 2)


class Overflow(NamedTuple):
    """A gradient that becomes inf or nan on one rank, in its second parameter, by this factor."""

    rank: int
    factor: float


# By step. The second parameter is in the second group; on rank 1 it is neither the first nor the last.
OVERFLOWS = {1: Overflow(rank=1, factor=LARGE), 4: Overflow(rank=0, factor=math.nan)}


def loss_of(parameters: list[torch.Tensor], step: int) -> torch.Tensor:
    """A loss that is computed in fp16 up to its last sum, as under autocast."""
    factors = torch.full((len(parameters), 2), SMALL).half()
    overflow = OVERFLOWS.get(step)
    if overflow and overflow.rank == dist.get_rank():
        factors[1, 1] = overflow.factor
    products = torch.stack(parameters).half() * factors * factors
    return 1 + products.float().sum()


class Facts(NamedTuple):
    """Of each step: the scaled loss, the gradients of each call of the optimizer's step, and the scale after it."""

    scaled_loss: list
    gradients: list
    scale: list


def facts(scaler: Any) -> Facts:
    parameters: list[torch.Tensor] = []
    for _ in range(PARAMETERS[dist.get_rank()]):
        parameters.append(nn.Parameter(torch.ones(2)))
    groups: list[dict] = [{"params": parameters[:1]}, {"params": parameters[1:]}]
    optimizer = SGD(groups, lr=1.0)
    gradients: list[list] = []  # of each call in the present step

    def note_gradients(*_: Any) -> None:
        gradients.append([plain(parameter.grad) for parameter in parameters])

    optimizer.register_step_pre_hook(note_gradients)
    found = Facts([], [], [])
    for step in range(STEPS):
        scaled_loss = scaler.scale(loss_of(parameters, step))
        scaled_loss.backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.scaled_loss.append(plain(scaled_loss))
        found.gradients.append(list(gradients))
        found.scale.append(plain(scaler.get_scale()))
        gradients.clear()
    return found


def reference() -> Facts:
    return facts(ShardedGradScaler("cpu", SCALE, growth_interval=GROWTH_INTERVAL))


def attempt(path: str) -> Facts:
    with observed():
        return facts(load_name(path, "LossScaler")(scale=SCALE, growth_interval=GROWTH_INTERVAL))


def finding(made: Facts, expected: Facts) -> Mistake | None:
    """The first mistake of the first step that has one."""
    for step in range(STEPS):
        for field in Facts._fields:
            of_ranks = at_step(getattr(made, field), step)
            right = at_step(getattr(expected, field), step)
            if not near(of_ranks, right):
                mistake = wrong_step(field, step, of_ranks, right)
                return mistake.at(f"step {step + 1}").with_values(field, of_ranks, {"they should be": right})
    return None


def wrong_step(field: str, step: int, of_ranks: list, right: list) -> Mistake:
    if field == "scaled_loss":
        return Mistake("not scaled")
    if field == "scale":
        return Mistake("other scale")
    if step in OVERFLOWS:
        return Mistake("not skipped").at(f"an overflow on rank {OVERFLOWS[step].rank}")
    if near(of_ranks, scaled(right, SCALE)):  # no step before the first overflow has another scale
        return Mistake("not unscaled")
    return Mistake("other step")


EXERCISE = Exercise(
    minutes=25,
    read="03_accelerate/MIXED_PRECISION.md",
    same_as="torch's ShardedGradScaler",
    world_sizes=(2, 3),
    reference=reference,
    attempt=attempt,
    finding=finding,
)
