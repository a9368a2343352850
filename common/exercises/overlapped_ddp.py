"""The checker of `overlapped_ddp`: when each all-reduce begins, whether it is waited for, and what it brings."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from common.exercises.checker import Checker
from common.exercises.compare import Gradients, at_step, gradients, wrong_means
from common.exercises.mistake import Mistake, SolutionFailed
from common.exercises.stage import load_name
from common.exercises.traffic import Message, Moment, Traffic, observed
from common.small.ddp.overlapped import OverlappedDDP

INPUTS = (1.0, 3.0, 8.0)  # by rank
STEPS = 2
LAYERS = 3


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


def reference() -> Gradients:
    """The gradients of a backward, which are the same in each step, and those with which each step is made."""
    module = network()
    module(inputs()).sum().backward()
    return Gradients(gradients(module), trained(OverlappedDDP(network()), Traffic()))


def attempt(path: str) -> Gradients:
    module = network()
    with observed() as traffic:
        traffic.moment = Moment(0, LAYERS)

        def note_gradient(_: nn.Parameter) -> None:
            traffic.moment = traffic.moment._replace(gradients_left=traffic.moment.gradients_left - 1)

        for parameter in module.parameters():  # before the solution's hooks, so that these see what is left
            parameter.register_post_accumulate_grad_hook(note_gradient)
        after = trained(load_name(path, "OverlappedDDP")(module), traffic)
        for step in range(1, STEPS + 1):
            mistake = wrong_messages([message for message in traffic.messages if message.called.step == step])
            if mistake:
                raise SolutionFailed(mistake.at(f"step {step}"))
    return Gradients([], after)


def wrong_messages(messages: list[Message]) -> Mistake | None:
    """The mistake in the times at which this rank has called the all-reduces of a step and waited for them."""
    if len(messages) != LAYERS:
        return Mistake("not one message each").at(f"{len(messages)} messages")
    if all(message.called.gradients_left == 0 for message in messages):
        return Mistake("not hidden")
    for message in messages:
        if message.waits and message.waits[0].gradients_left > 0:
            return Mistake("backward waited")
        steps_of_waits = {wait.step for wait in message.waits}
        if steps_of_waits != {message.called.step}:
            return Mistake("waited in another step")
    return None


def finding(made: Gradients, expected: Gradients) -> Mistake | None:
    for step in range(STEPS):
        after = at_step(made.after, step)
        means = at_step(expected.after, step)
        mistake = wrong_means(after, Gradients(expected.own, means))
        if mistake:
            return mistake.at(f"step {step + 1}").with_values("of the layers", after, {"means": means[0]})
    return None


CHECKER = Checker(reference, attempt, finding)
