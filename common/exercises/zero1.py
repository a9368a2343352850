"""The checker of `zero1`: how much of the optimizer's state each rank keeps, and which weights come out."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from common.exercises.checker import Checker
from common.exercises.compare import at_step, flat, near, weights
from common.exercises.mistake import Mistake
from common.exercises.stage import load_name
from common.exercises.traffic import observed
from common.small.zero import ZeRO1

INPUTS = ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0), (7.0, 2.0, 9.0))  # by rank
STEPS = 2
LAYERS = 5  # which the ranks cannot share out equally
LAYER_SIZE = 3  # numbers, which is odd: equal parts on two ranks have one of zero at their end
MOMENTS = 2 * LAYERS * LAYER_SIZE  # numbers in the whole state of AdamW
# AdamW divides by the gradient's size plus eps. With the usual 1e-8 a sum gives the same step as a mean.
SETTINGS: dict[str, Any] = {"lr": 0.1, "eps": 1.0}


def network() -> nn.Sequential:
    """Layers of equal size, which narrow to one number and widen again; no two numbers have the same gradient."""
    torch.manual_seed(0)
    shapes = [(LAYER_SIZE, 1), (1, LAYER_SIZE)] * LAYERS
    layers = [nn.Linear(*shape, bias=False) for shape in shapes[:LAYERS]]
    for layer in layers:
        nn.init.uniform_(layer.weight, 0.5, 1.5)
    return nn.Sequential(*layers).double()


def trained(module: nn.Module, optimizer: Any, loss_scale: int = 1) -> list:
    """The weights after each step."""
    found = []
    for _ in range(STEPS):
        loss = module(torch.tensor([INPUTS[dist.get_rank()]]).double()).sum()
        (loss_scale * loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(weights(module))
    return found


def state_size(optimizer: Optimizer) -> int:
    """How many numbers it keeps; the number of the step, which has no dimension, is not counted."""
    numbers = 0
    for state in optimizer.state.values():
        numbers += sum(tensor.numel() for tensor in state.values() if tensor.dim())
    return numbers


class Facts(NamedTuple):
    """The size of this rank's state, the weights after each step, and, of the reference, those that sums would give."""

    state: Any
    weights: list
    by_sums: list


def reference() -> Facts:
    module = network()
    after = trained(module, ZeRO1(module, AdamW, **SETTINGS))
    module = network()
    by_sums = trained(module, ZeRO1(module, AdamW, **SETTINGS), loss_scale=dist.get_world_size())
    return Facts(MOMENTS // dist.get_world_size(), after, by_sums)


def attempt(path: str) -> Facts:
    module = network()
    sizes = [0]
    hook = register_optimizer_step_post_hook(lambda optimizer, *_: sizes.append(state_size(optimizer)))
    with observed():
        after = trained(module, load_name(path, "ZeRO1")(module, **SETTINGS))
    hook.remove()
    return Facts(max(sizes), after, [])


def finding(made: Facts, expected: Facts) -> Mistake | None:
    if max(made.state) > MOMENTS * 2 / 3:  # a part is half of it, on two ranks, and perhaps a parameter more
        return Mistake("state not divided").with_values(
            "numbers in the state", made.state, {"all parameters": MOMENTS, "a part": expected.state[0]}
        )
    for step in range(STEPS):
        after = at_step(made.weights, step)
        right = at_step(expected.weights, step)
        by_sums = at_step(expected.by_sums, step)
        if not near(after, right):
            mistake = Mistake("stepped with sums") if near(after, by_sums) else wrong_weights(after, right[0])
            return mistake.at(f"step {step + 1}").with_values("weights", after, {"they should be": right[0]})
    return None


def wrong_weights(after: list[list], expected: list[list[float]]) -> Mistake:
    for right, *of_ranks in zip(flat(expected), *map(flat, after), strict=True):
        is_right_somewhere = any(near(right, number) for number in of_ranks)
        if not is_right_somewhere:
            return Mistake("other weights")
    return Mistake("not exchanged")


CHECKER = Checker(reference, attempt, finding)
