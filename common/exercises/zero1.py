"""The checker of `zero1`: with which gradients each rank steps, how much state it keeps, and which weights come out."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from common.exercises.compare import flat, gradients, near, plain, scaled, side_by_side
from common.exercises.stage import load_name
from common.exercises.traffic import observed
from common.small.ddp.naive import NaiveDDP
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
WHY_IT_HANGS = (
    "all ranks call the same collectives, for each parameter and in the same order, and not only for those that they"
    " own. A broadcast is not a send: the ranks that receive call it too, and `src`, the same number on all ranks, says"
    " who owns it"
)
SETTINGS: dict[str, Any] = {"lr": 0.1, "eps": 1.0}


def network() -> nn.Sequential:
    """Layers of equal size, which narrow to one number and widen again; no two numbers have the same gradient."""
    torch.manual_seed(0)
    shapes = [(LAYER_SIZE, 1), (1, LAYER_SIZE)] * LAYERS
    layers = [nn.Linear(*shape, bias=False) for shape in shapes[:LAYERS]]
    for layer in layers:
        nn.init.uniform_(layer.weight, 0.5, 1.5)
    return nn.Sequential(*layers).double()


def backward(model: nn.Module) -> None:
    model(torch.tensor([INPUTS[dist.get_rank()]]).double()).sum().backward()


def trained(module: nn.Module, optimizer: Any) -> list:
    """The weights after each step."""
    weights = []
    for _ in range(STEPS):
        backward(module)
        optimizer.step()
        optimizer.zero_grad()
        weights.append([plain(parameter.flatten()) for parameter in module.parameters()])
    return weights


def state_size(optimizer: Optimizer) -> int:
    """How many numbers it keeps; the number of the step, which has no dimension, is not counted."""
    tensors = flat(list(state.values()) for state in optimizer.state.values())
    return sum(tensor.numel() for tensor in tensors if tensor.dim())


def run(path: str) -> dict:
    """On one rank: gradients, state and weights of the solution, and those that are right."""
    module = network()
    expected = trained(module, ZeRO1(module, AdamW, **SETTINGS))
    small = NaiveDDP(network())
    backward(small)
    own = gradients(small)
    small.average_gradients()
    module = network()
    optimizers: list[Optimizer] = []  # by step
    stepped_with: list[list[float]] = []

    def note_step(optimizer: Optimizer, *_: Any) -> None:
        optimizers.append(optimizer)
        parameters = flat(group["params"] for group in optimizer.param_groups)
        stepped_with.append(flat(plain(each.grad.flatten()) for each in parameters if each.grad is not None))

    hook = register_optimizer_step_pre_hook(note_step)
    with observed():
        weights = trained(module, load_name(path, "ZeRO1")(module, **SETTINGS))
    hook.remove()
    groups = flat(optimizer.param_groups for optimizer in optimizers)
    return {
        "weights": weights,
        "expected": expected,
        "stepped_with": stepped_with,
        "own": flat(own),
        "means": flat(gradients(small)),
        "state": max(map(state_size, optimizers), default=0),
        "settings": [{name: group.get(name) for name in SETTINGS} for group in groups],
        "kinds": [type(optimizer).__name__ for optimizer in optimizers],
    }


def finding(results: list[dict]) -> str | None:
    return wrong_optimizers(results) or wrong_gradients(results) or wrong_weights(results)


def wrong_optimizers(results: list[dict]) -> str | None:
    """A finding about the AdamWs with which the ranks step, how often, and how much they keep."""
    kinds = [result["kinds"] for result in results]
    others = set(flat(kinds)) - {AdamW.__name__}
    if others:
        return f"the steps were made by {others.pop()}, and not by AdamW: each rank makes one torch.optim.AdamW"
    settings = [result["settings"][:1] for result in results]
    if any(of_group != SETTINGS for of_group in flat(settings)):
        title = "AdamW has other settings than ZeRO1 was given: hand all of them on (**settings); its settings:"
        return side_by_side(title, settings, they_should_be=SETTINGS)
    calls = list(map(len, kinds))
    if calls != [STEPS] * len(results):
        title = "ZeRO1.step() has to call step() of this rank's AdamW once, on every rank; its calls:"
        return side_by_side(title, calls, they_should_be=STEPS)
    state = [result["state"] for result in results]
    if max(state) > MOMENTS * 2 / 3:  # a part is half of it, on two ranks, and perhaps a parameter more
        title = (
            "a rank keeps more than its part of the optimizer's state, and under DDP every rank keeps all: give each"
            " rank's AdamW this rank's part of the parameters only; numbers in the state:"
        )
        return side_by_side(title, state, all_parameters=MOMENTS, a_part=MOMENTS // len(results))
    return None


def wrong_gradients(results: list[dict]) -> str | None:
    """A finding about the gradients with which each rank's AdamW has made its first step.

    A rank's part may be cut in any way, so its numbers are looked for among those of all parameters.
    """
    stepped_with = [result["stepped_with"][0] for result in results]
    own = [result["own"] for result in results]
    means = results[0]["means"]
    known = "they are neither each rank's own nor their sums"
    if not all(stepped_with):
        known = "there are none, and the step moves nothing: give each of AdamW's parameters a `.grad`"
    elif all(are_among(numbers, means) for numbers in stepped_with):
        return None
    elif all(are_among(numbers, scaled(means, len(results))) for numbers in stepped_with):
        known = (
            "they are the sums over the ranks: divide by the world size. AdamW divides by a gradient's size, so only a"
            " large eps, such as the one here, shows it"
        )
    elif all(map(are_among, stepped_with, own)):
        known = "they are each rank's own: average them, or the other ranks' samples teach this part nothing"
    title = f"the gradients with which each rank's AdamW made its first step are not the means over the ranks; {known}:"
    had = {f"rank_{rank}_had": of_rank for rank, of_rank in enumerate(own)}
    return side_by_side(title, stepped_with, **had, means=means)


def wrong_weights(results: list[dict]) -> str | None:
    """A finding about the weights after the first step after which they are wrong."""
    for step in range(STEPS):
        after = [result["weights"][step] for result in results]
        expected = results[0]["expected"][step]
        if near(after, [expected] * len(results)):
            continue
        # For each number: has a rank the right one?
        numbers = zip(flat(expected), *map(flat, after), strict=True)
        right_somewhere = [are_among([right], of_ranks) for right, *of_ranks in numbers]
        if all(right_somewhere):
            title = (
                "each rank has new numbers in its own part and old ones in the others': after the step the ranks have"
                " to exchange their parts (broadcast by the owner, or all-gather), in the parameters and not in copies"
            )
        elif step:
            title = (
                "the first step was right, and this one is not: zero_grad() has to clear the gradients of all"
                " parameters, and the AdamW has to be the same, because a new one has no moments"
            )
        else:
            title = (
                "some parameters have moved on no rank: either nobody owns them, or what a step writes into a part does"
                " not arrive in the parameters of `module`, or another rank's old numbers were sent over the new ones"
            )
        return side_by_side(f"{title}; the weights after step {step + 1}:", after, they_should_be=expected)
    return None


def are_among(numbers: list[float], all_of_them: list[float]) -> bool:
    """True where each number is one of the others, or the zero at the end of a part."""
    allowed = [0.0, *all_of_them]
    others = [number for number in numbers if not any(near(number, other) for other in allowed)]
    return not others
