"""The checker of `overlapped_ddp`: when each all-reduce begins, whether it is waited for, and what it brings."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from common.exercises.compare import gradients, side_by_side, wrong_means
from common.exercises.stage import SolutionFailed, load_name
from common.exercises.traffic import Message, Traffic, observed
from common.small.ddp.overlapped import OverlappedDDP

MINUTES = 25
READ = "common/small/ddp/README.md"
SAME_AS = "OverlappedDDP (common/small/ddp/overlapped.py)"
WORLD_SIZES = (2, 3)
INPUTS = (1.0, 3.0, 8.0)  # by rank
STEPS = 2
LAYERS = 3


class Moment(NamedTuple):
    """A time of the training."""

    step: int  # from 1 on; 0 before the first one
    gradients_left: int  # that the present backward has still to compute


def network() -> nn.Sequential:
    """Layers of one weight each, all of them 1, so that their gradients can be read."""
    layers = [nn.Linear(1, 1, bias=False).double() for _ in range(LAYERS)]
    for layer in layers:
        nn.init.ones_(layer.weight)
    return nn.Sequential(*layers)


def inputs() -> torch.Tensor:
    return torch.tensor([[INPUTS[dist.get_rank()]]]).double()


def trained(model: Any, traffic: Traffic) -> list[list]:
    """The gradients of all layers with which each step is made."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = []
    for step in range(1, STEPS + 1):
        traffic.moment = Moment(step, LAYERS)
        model(inputs()).sum().backward()
        if hasattr(model, "wait"):
            model.wait()
        found.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return found


def run(path: str) -> dict:
    """On one rank: the gradients of each step, and those that are right, after a look at the solution's messages."""
    means = trained(OverlappedDDP(network()), Traffic())
    module = network()
    module(inputs()).sum().backward()
    own = gradients(module)
    module = network()
    with observed() as traffic:
        traffic.moment = Moment(0, LAYERS)

        def note_gradient(_: nn.Parameter) -> None:
            traffic.moment = traffic.moment._replace(gradients_left=traffic.moment.gradients_left - 1)

        for parameter in module.parameters():  # before the solution's hooks, so that these see what is left
            parameter.register_post_accumulate_grad_hook(note_gradient)
        solution = load_name(path, "OverlappedDDP")(module)
        after = trained(solution, traffic)
        for step in range(1, STEPS + 1):
            found = wrong_messages([message for message in traffic.messages if message.began.step == step])
            if found:
                raise SolutionFailed(f"in step {step} {found}")
    return {"own": own, "after": after, "means": means}


def wrong_messages(messages: list[Message]) -> str | None:
    """A finding about the way in which this rank's all-reduces of a step were begun and waited for."""
    if len(messages) != LAYERS:
        return (
            f"{len(messages)} all-reduces began, for the gradients of {LAYERS} layers: hooks stay for all steps, so"
            " register one for each parameter in __init__, which sends the gradient of this parameter"
        )
    if all(message.began.gradients_left == 0 for message in messages):
        return (
            "the all-reduces began when backward had computed all gradients, so nothing was hidden: let a hook begin"
            " each one (register_post_accumulate_grad_hook)"
        )
    if any(message.waits and message.waits[0].gradients_left > 0 for message in messages):
        return (
            "an all-reduce was waited for while backward had gradients still to compute, so backward stood still: begin"
            " each with async_op=True, which returns a handle at once, and keep the handles for OverlappedDDP.wait()"
        )
    if any({wait.step for wait in message.waits} != {message.began.step} for message in messages):
        return (
            "an all-reduce was not waited for before the optimizer's step, or again after it: call wait() of each"
            " handle in OverlappedDDP.wait(), and then forget the handles"
        )
    return None


def finding(results: list[dict]) -> str | None:
    """What is wrong with the gradients of the first step that is wrong."""
    own = [result["own"] for result in results]
    for step in range(STEPS):
        after = [result["after"][step] for result in results]
        means = results[0]["means"][step]
        mistake = wrong_means(after, own, means)
        if mistake:
            title = f"in step {step + 1} the gradients of the {LAYERS} layers are not the means; {mistake}"
            return side_by_side(title, after, means=means)
    return None
