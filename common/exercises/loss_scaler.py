"""The checker of `loss_scaler`: which gradients a step is made with, on which ranks, and how the scale goes on."""

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import SGD

from common.exercises.checker import Checker
from common.exercises.compare import at_step, near, plain, scaled
from common.exercises.mistake import Mistake
from common.exercises.stage import load_name
from common.exercises.traffic import observed

SCALE = 513.0  # odd: // would be seen
GROWTH_INTERVAL = 2
# A parameter is multiplied by its factor twice, so its gradient is the factor's square.
SMALL = 2.0**-13  # the gradient is 1.5e-8, which is 0 in fp16
LARGE = 16.0  # the gradient is 256, which times 513 or 256.5 is inf in fp16
STEPS = 9  # the last four without an overflow, in which the scale doubles twice if two in a row double it
PARAMETERS = (2, 3, 2)  # of each rank's part: on rank 1 the second parameter is neither the first nor the last
# By step: the rank on which the gradient of the second parameter becomes inf or nan, and the factor that makes it so.
OVERFLOWS = {1: (1, LARGE), 4: (0, math.nan)}
WRONG = {"scaled_loss": "not scaled", "scale": "other scale"}


def loss_of(parameters: list[torch.Tensor], step: int) -> torch.Tensor:
    """A loss that is computed in fp16 up to its last sum, as under autocast."""
    factors = torch.full((len(parameters), 2), SMALL).half()
    rank, factor = OVERFLOWS.get(step, (None, SMALL))
    if rank == dist.get_rank():
        factors[1, 1] = factor
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
    optimizer = SGD([{"params": parameters[:1]}, {"params": parameters[1:]}], lr=1.0)
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
                mistake = wrong_gradients(step, of_ranks, right) if field == "gradients" else Mistake(WRONG[field])
                return mistake.at(f"step {step + 1}").with_values(field, of_ranks, {"they should be": right})
    return None


def wrong_gradients(step: int, of_ranks: list, right: list) -> Mistake:
    if step in OVERFLOWS:
        rank, _ = OVERFLOWS[step]
        return Mistake("not skipped").at(f"an overflow on rank {rank}")
    if near(of_ranks, scaled(right, SCALE)):  # no step before the first overflow has another scale
        return Mistake("not unscaled")
    return Mistake("other step")


CHECKER = Checker(reference, attempt, finding)
