"""The checker of `zero1`: how much of the optimizer's state each rank keeps, and which weights come out."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from common.exercises.compare import flat, near, side_by_side, weights
from common.exercises.stage import load_name
from common.exercises.traffic import observed
from common.small.zero import ZeRO1

MINUTES = 30
READ = "02_ddp_raw/MEMORY_AND_ZERO.md"
SAME_AS = "ZeRO1 (common/small/zero/zero1.py)"
WORLD_SIZES = (2, 3)
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
    tensors = flat(list(state.values()) for state in optimizer.state.values())
    return sum(tensor.numel() for tensor in tensors if tensor.dim())


def run(path: str) -> dict:
    """On one rank: state and weights of the solution, the weights that are right, and those that sums would give."""
    module = network()
    expected = trained(module, ZeRO1(module, AdamW, **SETTINGS))
    module = network()
    by_sums = trained(module, ZeRO1(module, AdamW, **SETTINGS), loss_scale=dist.get_world_size())
    module = network()
    state_sizes = [0]
    hook = register_optimizer_step_post_hook(lambda optimizer, *_: state_sizes.append(state_size(optimizer)))
    with observed():
        after = trained(module, load_name(path, "ZeRO1")(module, **SETTINGS))
    hook.remove()
    return {"state": max(state_sizes), "weights": after, "expected": expected, "by_sums": by_sums}


def finding(results: list[dict]) -> str | None:
    state = [result["state"] for result in results]
    if max(state) > MOMENTS * 2 / 3:  # a part is half of it, on two ranks, and perhaps a parameter more
        title = (
            "a rank keeps more than its part of the optimizer's state, and under DDP every rank keeps all: give each"
            " rank's AdamW this rank's part of the parameters only; numbers in the state:"
        )
        return side_by_side(title, state, all_parameters=MOMENTS, a_part=MOMENTS // len(results))
    for step in range(STEPS):
        after = [result["weights"][step] for result in results]
        expected = results[0]["expected"][step]
        if not near(after, [expected] * len(results)):
            title = wrong_weights(after, expected, results[0]["by_sums"][step])
            return side_by_side(f"{title}; the weights after step {step + 1}:", after, they_should_be=expected)
    return None


def wrong_weights(after: list[list], expected: list[list[float]], by_sums: list[list[float]]) -> str:
    if near(after, [by_sums] * len(after)):
        return (
            "the step was made with the sums over the ranks: divide by the world size. AdamW divides by a gradient's"
            " size, so only a large eps, such as the one here, shows it"
        )
    is_right_somewhere = []  # each number
    for right, *of_ranks in zip(flat(expected), *map(flat, after), strict=True):
        is_right_somewhere.append(any(near(right, number) for number in of_ranks))
    if all(is_right_somewhere):
        return (
            "each rank has new numbers in its own part and old ones in the others': after the step the ranks have to"
            " exchange their parts (broadcast by the owner, or all-gather), in the parameters and not in copies"
        )
    return (
        "these are not the weights of AdamW: each number of the module's own parameters is stepped by one rank, with"
        " the mean of the ranks' gradients, by the same AdamW in all steps, which has all settings; zero_grad() clears"
        " the gradients of all parameters"
    )
