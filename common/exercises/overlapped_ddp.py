"""The checker of `overlapped_ddp`: when each all-reduce begins, whether it is waited for, and what it brings."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.exercises.compare import (
    agreed,
    divisors,
    exactly,
    flat,
    mistake,
    plain,
    scaled,
    shown,
    side_by_side,
)
from common.exercises.link import Message, SlowLink, slow_link
from common.exercises.stage import SolutionFailed, in_rounds, load_name, on_ranks
from common.small.ddp.overlapped import OverlappedDDP

MINUTES = 25
READ = "common/small/ddp/README.md"
SAME_AS = "OverlappedDDP (common/small/ddp/overlapped.py) and torch's DistributedDataParallel"
WORLD_SIZES = (2, 3)
INPUTS = (1.0, 3.0, 8.0)  # by rank
STEPS = 2
LAYERS = 3
HOOKS_OF_MODULES = (
    "a full backward hook of a module may be called before its parameters' gradients are there, when parameter.grad is"
    " None: use parameter.register_post_accumulate_grad_hook on each parameter, which is called afterwards"
)


def network() -> nn.Sequential:
    """Layers of one weight each, all of them 1, so that their gradients can be read."""
    layers = [nn.Linear(1, 1, bias=False).double() for _ in range(LAYERS)]
    for layer in layers:
        nn.init.ones_(layer.weight)
    return nn.Sequential(*layers)


def inputs() -> torch.Tensor:
    return torch.tensor([[INPUTS[dist.get_rank()]]]).double()


def gradients(module: nn.Module) -> list:
    found: list = []
    for parameter in module.parameters():
        if parameter.grad is None:
            found.append(None)
        else:
            found.append(plain(parameter.grad.flatten())[0])
    return found


def averaged(model: Any, wait: bool = False, link: SlowLink | None = None) -> list[list]:
    """The gradients of all layers after each step's backward, and after the wait of a solution.

    Messages note the step, and how many gradients backward has still to compute.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = []
    for step in range(1, STEPS + 1):
        if link:
            link.step = step
            link.gradients_left = LAYERS
        model(inputs()).sum().backward()
        if wait:
            model.wait()
        found.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return found


def run(path: str) -> dict:
    """On one rank: the gradients of each step, and the messages of the solution."""
    expected = agreed(
        real=averaged(DistributedDataParallel(network())),
        small=averaged(OverlappedDDP(network())),
    )
    module = network()
    module(inputs()).sum().backward()
    own = gradients(module)
    with slow_link() as link:
        solution = load_name(path, "OverlappedDDP")
        module = network()
        link.parameters = list(module.parameters())

        def note_gradient(_: nn.Parameter) -> None:
            link.gradients_left -= 1

        for parameter in module.parameters():  # before the solution's hooks, so that these see what is left
            parameter.register_post_accumulate_grad_hook(note_gradient)
        try:
            found = averaged(solution(module), wait=True, link=link)
        except (AttributeError, TypeError) as error:
            sentence = why_none(error, path, module, link)
            if sentence is None:
                raise
            raise SolutionFailed(sentence) from error
        return {
            "own": own,
            "after": found,
            "expected": expected,
            "traffic": [described(message) for message in link.messages if message.step],
            "hooks_of_modules": uses_hooks_of_modules(path),
        }


def uses_hooks_of_modules(path: str) -> bool:
    return "register_full_backward_" in Path(path).read_text()


def why_none(error: Exception, path: str, module: nn.Module, link: SlowLink) -> str | None:
    """The idea behind an error about None: it came where a gradient, or a handle, was expected."""
    if "None" not in str(error):
        return None
    late = arrived_late([described(message) for message in link.messages if 0 < message.step < link.step])
    if late:
        return late
    if uses_hooks_of_modules(path):
        return HOOKS_OF_MODULES
    if any(parameter._backward_hooks for parameter in module.parameters()):
        return (
            "register_hook calls its function before backward has written parameter.grad, which is None then: use"
            " parameter.register_post_accumulate_grad_hook, which calls it afterwards, with the parameter"
        )
    if any(not message.in_background for message in link.messages):
        return (
            "all_reduce returned None and no handle: without async_op=True it makes backward wait until the sum has"
            " arrived; with async_op=True it returns a handle at once"
        )
    return None


def described(message: Message) -> dict:
    return {
        "step": message.step,
        "gradients": message.gradients,
        "is_weights": bool(message.weights),
        "in_background": message.in_background,
        "early": message.gradients_left > 0,
        "held_up_backward": message.held_up_backward,
        "was_waited_for": message.times_waited > 0,
        "arrived_in_time": message.first_step_waited == message.step,
        "waited_later": message.last_step_waited > message.step,
        "was_changed": message.was_changed,
    }


def check(path: Path) -> list[str]:
    """Two steps of a network with three layers, on two and on three ranks."""

    def on(world_size: int) -> list[str | None]:
        results = on_ranks(world_size, run, path)
        found = wrong_traffic(results[0]["traffic"])
        if found and results[0]["hooks_of_modules"]:
            found = f"{found}\n    {HOOKS_OF_MODULES}"
        return [found or wrong_gradients(results)]

    return in_rounds(WORLD_SIZES, on)


def wrong_traffic(messages: list[dict]) -> str | None:
    """A finding about the way in which the all-reduces of rank 0 were called."""
    total = len(messages)
    weights = [message for message in messages if message["is_weights"]]
    blocking = [message for message in messages if not message["in_background"]]
    early = [message for message in messages if message["early"]]
    held_up = [message for message in messages if message["held_up_backward"]]
    if not messages:
        return "no all-reduce was called: a hook has to begin one for each gradient"
    if weights:
        return (
            f"{len(weights)} of {total} all-reduces were given a parameter, which is the weights: its gradient, which"
            " has to be averaged, is parameter.grad"
        )
    if blocking and early:
        return (
            f"{len(blocking)} of {total} all-reduces were called without async_op=True, so backward stood still until"
            " each had arrived: begin them with async_op=True, and keep the handles for wait()"
        )
    if not early:
        return (
            f"{total} of {total} all-reduces began when backward had computed all gradients, so nothing was hidden:"
            " let a hook begin each one (register_post_accumulate_grad_hook)"
        )
    if held_up:
        return (
            f"{len(held_up)} of {total} handles were waited for while backward had gradients still to compute, so it"
            " stood still: keep the handles, and wait for them in OverlappedDDP.wait()"
        )
    return wrong_count(messages) or wrong_waits(messages)


def wrong_waits(messages: list[dict]) -> str | None:
    """A finding about the handles of rank 0, and about its gradients until they were waited for."""
    total = len(messages)
    waited = [message for message in messages if message["was_waited_for"]]
    waited_later = [message for message in messages if message["waited_later"]]
    changed = [message for message in messages if message["was_changed"]]
    late = arrived_late(messages)
    if waited_later and len(waited) == total:
        return (
            f"{len(waited_later)} of {total} handles were waited for again in the next step: forget the handles of a"
            " step when all have arrived"
        )
    if late:
        return late
    if changed:
        return (
            f"{len(changed)} of {total} gradients were changed while their all-reduce was under way: divide before it"
            " begins, or after the wait() of its own handle"
        )
    return None


def arrived_late(messages: list[dict]) -> str | None:
    """A finding about all-reduces that had not arrived when the optimizer made the step with their gradients."""
    late = [message for message in messages if not message["arrived_in_time"]]
    if not late:
        return None
    return (
        f"{len(late)} of {len(messages)} all-reduces were not waited for before the optimizer's step: call wait() of"
        " each handle in OverlappedDDP.wait()"
    )


def wrong_count(messages: list[dict]) -> str | None:
    """A finding about gradients that are not sent once in each step. Of copies nobody knows whose they are."""
    if not all(message["gradients"] for message in messages):
        return None
    for step in range(1, STEPS + 1):
        sent = flat(message["gradients"] for message in messages if message["step"] == step)
        times = [sent.count(layer) for layer in range(LAYERS)]
        if times == [1] * LAYERS:
            continue
        title = f"in step {step} the gradients of the {LAYERS} layers were sent {times} times, and not once each"
        if min(times):
            return f"{title}: hooks stay for all steps, so register one for each parameter in __init__, and no more"
        return f"{title}: each hook is called with its own parameter, so send the gradient of that one"
    return None


def wrong_gradients(results: list[dict]) -> str | None:
    """A finding about the gradients of the first step that is wrong."""
    world_size = len(results)
    own = [result["own"] for result in results]
    for step in range(STEPS):
        after = [result["after"][step] for result in results]
        expected = results[0]["expected"][step]
        if exactly(after, [expected] * world_size):
            continue
        reason = "no sum has arrived when wait() returns"
        if not any(message["gradients"] for message in results[0]["traffic"]):
            reason = "the sums arrive in copies of them: hand parameter.grad itself to all_reduce"
        total = scaled(expected, world_size)
        known = mistake(
            after,
            {
                "they are the sums over the ranks: divide by the world size": [total] * world_size,
                f"they are each rank's own: {reason}": own,
                f"they are each rank's own, divided by the world size: {reason}": scaled(own, 1 / world_size),
            },
        )
        divided_by = divisors(after, total)
        if known is None and divided_by:
            known = f"the sums were divided by {shown(divided_by)}: divide each one once, by the world size"
        known = known or "a mean is the sum of the ranks' gradients, divided once by the world size"
        title = f"in step {step + 1} the gradients of the {LAYERS} layers are not the means over the ranks; {known}"
        return side_by_side(title, after, they_should_be=expected)
    return None
