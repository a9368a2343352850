"""The checker of `accumulate`: what happens in each step, in which order, and with which gradient it ends."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from common.exercises.checker import Checker
from common.exercises.compare import at_step, near
from common.exercises.mistake import Mistake
from common.exercises.stage import load_name
from common.exercises.traffic import observed
from common.small.ddp.overlapped import OverlappedDDP

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


def expected_events(count: int) -> list[str]:
    return [FORWARD, "backward"] * count + ["message", "step"]


class Facts(NamedTuple):
    """The events of each step, and the gradient with which the optimizer made it."""

    events: list
    gradients: list


def reference() -> Facts:
    model: Any = OverlappedDDP(network())
    optimizer = SGD(model.parameters(), lr=0.1)
    gradients = []
    for step, count in enumerate(MICRO_BATCHES):
        *earlier, (inputs, targets) = micro_batches_of(step)
        with model.no_sync():
            for its_inputs, its_targets in earlier:
                (F.mse_loss(model(its_inputs), its_targets) / count).backward()
        (F.mse_loss(model(inputs), targets) / count).backward()
        gradients.append(model.module.weight.grad.item())
        optimizer.step()
        optimizer.zero_grad()
    return Facts(list(map(expected_events, MICRO_BATCHES)), gradients)


def attempt(path: str) -> Facts:
    model = DistributedDataParallel(network())
    weight = model.module.weight
    optimizer = SGD(model.parameters(), lr=0.1)
    events: list[str] = []  # of the present step
    gradients: list[float] = []

    def note_message(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        events.append("message")
        work = all_reduce(bucket.buffer() / dist.get_world_size(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    def note_step(*_: Any) -> None:
        events.append("step")
        gradients.append(0.0 if weight.grad is None else weight.grad.item())

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
    return Facts(events_of_steps, gradients)


def finding(made: Facts, expected: Facts) -> Mistake | None:
    for step, count in enumerate(MICRO_BATCHES):
        where = f"step {step + 1}, of {count} micro-batches"
        for events in made.events:
            mistake = wrong_events(events[step], count)
            if mistake:
                of_ranks = at_step(made.events, step)
                return mistake.at(where).with_values(
                    "what happened", of_ranks, {"it should be": expected_events(count)}
                )
        gradients = at_step(made.gradients, step)
        if not near(gradients, at_step(expected.gradients, step)):
            mistake = wrong_gradient(gradients[0], expected.gradients[0], step)
            what = "the gradient with which the step was made"
            return mistake.at(where).with_values(what, gradients, {"it should be": expected.gradients[0][step]})
    return None


def wrong_events(events: list[str], count: int) -> Mistake | None:
    """The mistake in the order of forwards, backwards, messages and optimizer steps."""
    if events == expected_events(count):
        return None
    without_messages = [event for event in events if event != "message"]
    passes = [event for event in without_messages if event != "step"]
    if passes != [FORWARD, "backward"] * count:
        return Mistake("all in memory")
    if without_messages == [*passes, "step"]:
        return Mistake("not sent once")
    return Mistake("not one step")


def wrong_gradient(gradient: float, expected: list[float], step: int) -> Mistake:
    if near(gradient, MICRO_BATCHES[step] * expected[step]):
        return Mistake("added")
    if step > 0 and near(gradient, expected[step] + expected[step - 1]):
        return Mistake("not cleared")
    return Mistake("other gradient")


CHECKER = Checker(reference, attempt, finding)
