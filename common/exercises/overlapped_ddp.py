"""The checker of `overlapped_ddp`: when each all-reduce begins, whether it is waited for, and what it brings."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from common.exercises.compare import flat, gradients, side_by_side, wrong_means
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
LATE = "were not waited for before the optimizer's step: call wait() of each handle in OverlappedDDP.wait()"


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
    """On one rank: the gradients of each step, and the messages of the solution."""
    means = trained(OverlappedDDP(network()), Traffic())
    module = network()
    module(inputs()).sum().backward()
    own = gradients(module)
    module = network()
    layers: list[list[int]] = []  # of each message

    def note_layers(message: Message) -> None:
        sent = []
        for layer, parameter in enumerate(module.parameters()):
            if is_of(message, parameter.grad):
                sent.append(layer)
        layers.append(sent)

    with observed() as traffic:
        traffic.moment = Moment(0, LAYERS)

        def note_gradient(_: nn.Parameter) -> None:
            traffic.moment = traffic.moment._replace(gradients_left=traffic.moment.gradients_left - 1)

        for parameter in module.parameters():  # before the solution's hooks, so that these see what is left
            parameter.register_post_accumulate_grad_hook(note_gradient)
        solution = load_name(path, "OverlappedDDP")(module)
        begun = len(traffic.messages)
        traffic.note = note_layers
        try:
            after = trained(solution, traffic)
            found = wrong_traffic(traffic.messages[begun:], layers, list(module.parameters()))
        except (AttributeError, TypeError) as error:
            found = why_none(module, traffic.messages[begun:], traffic.moment.step)
            if "None" not in str(error) or not found:
                raise
        if found:
            raise SolutionFailed(found)
    return {"own": own, "after": after, "means": means}


def is_of(message: Message, tensor: torch.Tensor | None) -> bool:
    """True where the message was given this very tensor."""
    if tensor is None or message.tensor is None:
        return False
    return message.tensor.data_ptr() == tensor.data_ptr()


def why_none(module: nn.Module, messages: list[Message], step: int) -> str | None:
    """The idea behind an error about None: it came where a gradient, or a handle, was expected."""
    if any(late(message) for message in messages if message.began.step < step):
        return f"not all messages {LATE}"
    if any(not message.in_background for message in messages):
        return (
            "all_reduce returned None and no handle: without async_op=True it makes backward wait until the sum has"
            " arrived; with async_op=True it returns a handle at once"
        )
    hooks = [parameter._backward_hooks for parameter in module.parameters()]
    if any(hooks) or any(layer._backward_hooks for layer in module.modules()):
        return (
            "register_hook, and the backward hooks of modules, may call a function before parameter.grad is written,"
            " which is None then: use parameter.register_post_accumulate_grad_hook on each parameter, which calls it"
            " afterwards, with the parameter"
        )
    return None


def late(message: Message) -> bool:
    """The message had not arrived when the optimizer made the step."""
    return not message.waits or message.waits[0].step > message.began.step


def wrong_traffic(messages: list[Message], layers: list[list[int]], weights: list[nn.Parameter]) -> str | None:
    """A finding about the way in which this rank's all-reduces were called."""
    early = [message for message in messages if message.began.gradients_left > 0]
    mistakes = {
        "were given a parameter, which is the weights: its gradient, which has to be averaged, is parameter.grad": [
            message for message in messages if any(is_of(message, weight) for weight in weights)
        ],
        "began when backward had computed all gradients, so nothing was hidden: let a hook begin each one"
        " (register_post_accumulate_grad_hook)": [] if early else messages,
        "were called without async_op=True, so backward stood still until each had arrived: begin them with"
        " async_op=True, and keep the handles for wait()": [
            message for message in messages if not message.in_background
        ],
        "were waited for while backward had gradients still to compute, so it stood still: keep the handles, and wait"
        " for them in OverlappedDDP.wait()": [
            message for message in messages if message.waits and message.waits[0].gradients_left > 0
        ],
        LATE: [message for message in messages if late(message)],
        "were waited for again in the next step: forget the handles of a step when all have arrived": [
            message for message in messages if message.waits and message.waits[-1].step > message.waits[0].step
        ],
    }
    for sentence, those in mistakes.items():
        if those:
            return f"{len(those)} of {len(messages)} all-reduces {sentence}"
    return wrong_count(messages, layers)


def wrong_count(messages: list[Message], layers: list[list[int]]) -> str | None:
    """A finding about gradients that are not sent once in each step. Of copies nobody knows whose they are."""
    if not all(layers):
        return None
    for step in range(1, STEPS + 1):
        sent = flat(of for of, message in zip(layers, messages, strict=True) if message.began.step == step)
        if sorted(sent) != list(range(LAYERS)):
            times = [sent.count(layer) for layer in range(LAYERS)]
            return (
                f"in step {step} the gradients of the {LAYERS} layers were sent {times} times, and not once each: hooks"
                " stay for all steps, so register one for each parameter in __init__, and send the gradient of the"
                " parameter with which it is called"
            )
    return None


def finding(results: list[dict]) -> str | None:
    """What is wrong with the gradients of the first step that is wrong."""
    own = [result["own"] for result in results]
    for step in range(STEPS):
        after = [result["after"][step] for result in results]
        means = results[0]["means"][step]
        known = wrong_means(after, own, means)
        if known:
            title = f"in step {step + 1} the gradients of the {LAYERS} layers are not the means; {known}"
            return side_by_side(title, after, means=means)
    return None
