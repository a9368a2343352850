"""The checker of `accumulate`: what happens in each step, in which order, and with which gradient it ends."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from common.exercises.compare import near, side_by_side
from common.exercises.stage import load_name
from common.exercises.traffic import observed
from common.small.ddp.overlapped import OverlappedDDP

MINUTES = 15
READ = "common/small/ddp/README.md"
SAME_AS = "OverlappedDDP (common/small/ddp/overlapped.py)"
WORLD_SIZES = (2, 3)
MICRO_BATCHES = (3, 2)  # by step
MICRO_BATCH_SIZE = 2
FORWARD = f"forward of {MICRO_BATCH_SIZE}"

all_reduce = dist.all_reduce  # torch's own, whatever a solution's calls are replaced by


def network() -> nn.Linear:
    """One weight, 1 at first, so that it can be read."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(model.weight)
    return model


def micro_batches_of(step: int) -> list[tuple[Tensor, Tensor]]:
    """This rank's part of the samples of a step."""
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    inputs = torch.rand(MICRO_BATCHES[step], MICRO_BATCH_SIZE, 1, generator=generator).double()
    targets = 3 * inputs + torch.rand(inputs.shape, generator=generator)
    return list(zip(inputs, targets, strict=True))


def gradients_of_the_small_one() -> list[float]:
    """The gradient with which each step is made."""
    model: Any = OverlappedDDP(network())
    optimizer = SGD(model.parameters(), lr=0.1)
    found = []
    for step, count in enumerate(MICRO_BATCHES):
        *earlier, (inputs, targets) = micro_batches_of(step)
        with model.no_sync():
            for its_inputs, its_targets in earlier:
                (F.mse_loss(model(its_inputs), its_targets) / count).backward()
        (F.mse_loss(model(inputs), targets) / count).backward()
        found.append(model.module.weight.grad.item())
        optimizer.step()
        optimizer.zero_grad()
    return found


def run(path: str) -> dict:
    """On one rank: the events of each step, the gradient of each step of the optimizer, and those that are right."""
    expected = gradients_of_the_small_one()
    model = DistributedDataParallel(network())
    weight = model.module.weight
    optimizer = SGD(model.parameters(), lr=0.1)
    events: list[str] = []  # of the present step
    made: list[float] = []

    def note_message(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        events.append("message")
        work = all_reduce(bucket.buffer() / dist.get_world_size(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    def note_step(*_: Any) -> None:
        events.append("step")
        made.append(0.0 if weight.grad is None else weight.grad.item())

    model.register_comm_hook(None, note_message)
    model.module.register_forward_pre_hook(lambda _, inputs: events.append(f"forward of {len(inputs[0])}"))
    weight.register_hook(lambda _: events.append("backward"))
    optimizer.register_step_pre_hook(note_step)
    events_of_steps = []
    with observed() as traffic:
        traffic.note = lambda _: events.append("message")  # of a solution that sends by hand
        train_step = load_name(path, "train_step")
        for step in range(len(MICRO_BATCHES)):
            train_step(model, optimizer, micro_batches_of(step))
            events_of_steps.append(list(events))
            events.clear()
    return {"events": events_of_steps, "made": made, "expected": expected}


def finding(results: list[dict]) -> str | None:
    """What is wrong in the first step where something is."""
    for step, count in enumerate(MICRO_BATCHES):
        found = wrong_events([result["events"][step] for result in results], count) or wrong_gradient(results, step)
        if found:
            return f"in step {step + 1}, of {count} micro-batches, {found}"
    return None


def wrong_events(events: list[list[str]], count: int) -> str | None:
    """A finding about the order of forwards, backwards, messages and optimizer steps."""
    expected = [FORWARD, "backward"] * count + ["message", "step"]
    wrong_ones = [of_rank for of_rank in events if of_rank != expected]
    if not wrong_ones:
        return None
    without_messages = [event for event in wrong_ones[0] if event != "message"]
    title = "make one optimizer step, after the backward of the last micro-batch: until then the gradients add up"
    if [event for event in without_messages if event != "step"] != [FORWARD, "backward"] * count:
        title = (
            "several micro-batches were in memory at once, as much as of a large batch, and accumulation is there for"
            " those who lack it: call the forward and then the backward of each one"
        )
    elif without_messages[-1:] == ["step"] and without_messages.count("step") == 1:
        title = (
            "the gradients have to be sent once, by the backward of the last micro-batch, which sends the sum of all:"
            " the others belong into `with model.no_sync():`, forward and backward, and the last one outside"
            " (model.module(inputs) goes past DDP, which then sends nothing)"
        )
    return side_by_side(f"{title}; what happened:", events, it_should_be=expected)


def wrong_gradient(results: list[dict], step: int) -> str | None:
    """A finding about the gradient in `.grad` when the optimizer made the step."""
    made = [result["made"][step] for result in results]
    expected = results[0]["expected"][step]
    if near(made, [expected] * len(results)):
        return None
    title = "divide each loss once, by len(micro_batches), and call zero_grad() once in a step, not before it is made"
    if near(made[0], MICRO_BATCHES[step] * expected):
        title = "the gradients of the micro-batches were added and not averaged: divide each loss by their number"
    elif step > 0 and near(made[0], expected + results[0]["expected"][step - 1]):
        title = "the gradient of the step before was still there: call zero_grad() once in each step"
    return side_by_side(f"{title}; the gradient with which the step was made:", made, it_should_be=expected)
