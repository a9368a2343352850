"""The checker of `zero1`: how much of the optimizer's state each rank keeps, and which weights come out."""

import math
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from common.exercises.compare import Mistake, as_numbers, by_rank, near
from common.exercises.traffic import Traffic
from common.small.zero import ZeRO1

INPUTS_BY_RANK = ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0), (7.0, 2.0, 9.0))
STEPS = 2
LAYER_WIDTHS = ((3, 1), (1, 3), (3, 1), (1, 3), (3, 1))  # two or three ranks cannot share out five layers equally
WEIGHTS_PER_LAYER = math.prod(LAYER_WIDTHS[0])  # the same for all layers
MOMENTS_PER_WEIGHT = 2  # AdamW keeps two numbers for each weight
# AdamW divides by the gradient's size plus eps. With the usual 1e-8 a sum gives the same step as a mean.
SETTINGS: dict[str, Any] = {"lr": 0.1, "eps": 1.0}


def network() -> nn.Sequential:
    """Layers of three weights each. No two weights have the same gradient."""
    torch.manual_seed(0)
    layers = [nn.Linear(*widths, bias=False) for widths in LAYER_WIDTHS]
    for layer in layers:
        nn.init.uniform_(layer.weight, 0.5, 1.5)
    return nn.Sequential(*layers).double()


def train(module: nn.Module, optimizer: Any, factor: float = 1.0) -> list:
    """The weights after each step, with `factor` times the gradients."""
    found = []
    for _ in range(STEPS):
        loss = module(torch.tensor([INPUTS_BY_RANK[dist.get_rank()]]).double()).sum()
        (factor * loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        weights = [as_numbers(parameter.flatten()) for parameter in module.parameters()]
        found.append(weights)
    return found


def state_size(optimizer: Optimizer) -> int:
    """The count of the numbers that it keeps, without the number of the step, which has no dimension."""
    numbers = 0
    for state in optimizer.state.values():
        numbers += sum(tensor.numel() for tensor in state.values() if tensor.dim())
    return numbers


class Result(NamedTuple):
    """The size of the states of this rank's optimizers, and the weights after each step."""

    state: int
    weights: list


class Expected(NamedTuple):
    """The weights after each step with the means of the ranks' gradients, and with their sums."""

    means: list
    sums: list


def reference() -> Expected:
    module = network()
    means = train(module, ZeRO1(module, AdamW, **SETTINGS))
    module = network()
    # ZeRO1 divides by the world size again.
    sums = train(module, ZeRO1(module, AdamW, **SETTINGS), factor=dist.get_world_size())
    return Expected(means, sums)


def attempt(solution: ModuleType, _: Traffic) -> Result:
    module = network()
    optimizers: set[Optimizer] = set()  # those that have made a step
    hook = register_optimizer_step_post_hook(lambda optimizer, *_: optimizers.add(optimizer))
    after = train(module, solution.ZeRO1(module, **SETTINGS))
    hook.remove()
    return Result(sum(map(state_size, optimizers)), after)


def largest_part(world_size: int) -> int:
    """The most numbers in a rank's part of the state, whether whole layers are dealt out or each layer is cut."""
    whole_layers = math.ceil(len(LAYER_WIDTHS) / world_size) * WEIGHTS_PER_LAYER
    part_of_each = len(LAYER_WIDTHS) * math.ceil(WEIGHTS_PER_LAYER / world_size)  # filled up with zeros
    return MOMENTS_PER_WEIGHT * max(whole_layers, part_of_each)


def check(actual: list[Result], expected: list[Expected]) -> None:
    sizes = [result.state for result in actual]
    whole = MOMENTS_PER_WEIGHT * WEIGHTS_PER_LAYER * len(LAYER_WIDTHS)
    most = largest_part(len(actual))
    if max(sizes) > most:
        raise Mistake(
            "a rank keeps more than its part of the optimizer's state: give each rank's AdamW this rank's part of the "
            "parameters only. Numbers in the state:",
            by_rank(sizes) | {"all parameters": whole, "a part, at most": most},
        )
    for step in range(STEPS):
        after = [result.weights[step] for result in actual]
        check_weights(step, after, expected[0].means[step], expected[0].sums[step])


def check_weights(step: int, after: list[list], right: list, with_sums: list) -> None:
    """Raise a Mistake if a rank has other weights after a step than AdamW on one device."""
    if near(after, [right] * len(after)):
        return
    if not near(after, [after[0]] * len(after)):
        sentence = (
            "the ranks have different weights: new ones in their own part and old ones in the others'. They have to "
            "exchange their parts, in the parameters themselves: broadcast each from its owner, or all-gather them"
        )
    elif near(after, [with_sums] * len(after)):
        sentence = "these are the weights of a step with the sums of the gradients: divide the sums by the world size"
    else:
        sentence = "these are not the weights of one AdamW, with all settings, that steps each parameter on one rank"
    raise Mistake(f"step {step + 1}: {sentence}", by_rank(after) | {"they should be": right})
