"""The checker of `overlapped_ddp`: when each all-reduce begins, whether it is waited for, and what it brings."""

from types import ModuleType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from common.exercises.compare import Gradients, Mistake, check_means, gradients
from common.exercises.traffic import Traffic
from common.small.ddp.overlapped import OverlappedDDP

INPUTS_BY_RANK = (1.0, 3.0, 8.0)
STEPS = 2
LAYERS = 3


def network() -> nn.Sequential:
    """Layers of one weight each, all of them 1, so that their gradients can be read."""
    layers = [nn.Linear(1, 1, bias=False).double() for _ in range(LAYERS)]
    for layer in layers:
        nn.init.ones_(layer.weight)
    return nn.Sequential(*layers)


def backward(model: nn.Module) -> None:
    model(torch.tensor([[INPUTS_BY_RANK[dist.get_rank()]]]).double()).sum().backward()


class Step(NamedTuple):
    """The events of a step of the solution, and the gradients after it."""

    events: list[str]
    gradients: list


def reference() -> Gradients:
    """The gradients of a step. They are the same in each, because no optimizer changes the weights."""
    module = network()
    backward(module)
    small = OverlappedDDP(network())
    backward(small)
    return Gradients(gradients(module), gradients(small))


def attempt(solution: ModuleType, traffic: Traffic) -> list[Step]:
    module = network()
    for parameter in module.parameters():  # before the solution's hooks, so that the gradient precedes its message
        parameter.register_post_accumulate_grad_hook(lambda _: traffic.events.append("gradient"))
    model = solution.OverlappedDDP(module)
    steps = []
    for _ in range(STEPS):
        traffic.events.clear()
        backward(model)
        model.wait()
        steps.append(Step(list(traffic.events), gradients(module)))
        module.zero_grad()
    return steps


def check(actual: list[list[Step]], expected: list[Gradients]) -> None:
    for number in range(STEPS):
        steps = [result[number] for result in actual]
        for step in steps:
            check_events(f"step {number + 1}", step.events)
        after = [step.gradients for step in steps]
        check_means(f"step {number + 1}: the gradients of the layers", after, expected)


def check_events(step: str, events: list[str]) -> None:
    """Raise a Mistake if all-reduces are not begun during backward, or not waited for when it has ended."""
    if events.count("all_reduce") != LAYERS:
        raise Mistake(
            f"{step}: {events.count('all_reduce')} all-reduces began, and not one for each of {LAYERS} layers. Hooks "
            "stay for all steps, so register one for each parameter in __init__, which sends this parameter's gradient"
        )
    last_gradient = max(index for index, event in enumerate(events) if event == "gradient")
    during_backward = events[:last_gradient]
    if "all_reduce" not in during_backward:
        raise Mistake(
            f"{step}: the all-reduces began when backward had computed all gradients, so nothing was hidden: let a "
            "hook begin each one (register_post_accumulate_grad_hook)"
        )
    if "wait" in during_backward:
        raise Mistake(
            f"{step}: an all-reduce was waited for while backward had gradients still to compute, so backward stood "
            "still: begin each with async_op=True, which returns a handle at once, and wait in OverlappedDDP.wait()"
        )
    if events.count("wait") > LAYERS:
        raise Mistake(f"{step}: an all-reduce was waited for again: OverlappedDDP.wait() has to forget its handles")
