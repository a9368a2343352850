"""The checker of `accumulate`: what happens in each step, in which order, and with which gradient it ends."""

from types import ModuleType
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from common.exercises.compare import Mistake, by_rank, near
from common.exercises.traffic import Traffic

LR = 0.1
MICRO_BATCHES_BY_STEP = (3, 2)
PASSES = ["forward of 2", "backward"]  # the events of a micro-batch, which has two samples
MESSAGE = ["all_reduce", "wait"]


def network() -> nn.Linear:
    """One weight, 1 at first, so that it can be read."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(model.weight)
    return model


def samples_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a rank in a step, in micro-batches of two."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    inputs = torch.rand(MICRO_BATCHES_BY_STEP[step], 2, 1, generator=generator).double()
    return inputs, 3 * inputs + torch.rand(inputs.shape, generator=generator)


class Result(NamedTuple):
    """The events of each step, and the gradient that the optimizer has subtracted in it."""

    events: list[list[str]]
    gradients: list[float]


def reference() -> list[float]:
    """The gradient of each step, on one device that has the samples of all ranks."""
    model = network()
    optimizer = SGD(model.parameters(), lr=LR)
    gradients = []
    for step in range(len(MICRO_BATCHES_BY_STEP)):
        shares = [samples_of(step, rank) for rank in range(dist.get_world_size())]
        inputs = torch.cat([inputs for inputs, _ in shares])
        targets = torch.cat([targets for _, targets in shares])
        F.mse_loss(model(inputs), targets).backward()
        gradients.append(model.weight.grad.item())
        optimizer.step()
        optimizer.zero_grad()
    return gradients


def mean_over_ranks(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's communication hook. DDP's own all-reduce is C++, and would not go over the simulated network."""
    mean = bucket.buffer() / dist.get_world_size()
    dist.all_reduce(mean)
    averaged: torch.futures.Future[Tensor] = torch.futures.Future()
    averaged.set_result(mean)
    return averaged


def attempt(solution: ModuleType, traffic: Traffic) -> Result:
    model = DistributedDataParallel(network())
    model.register_comm_hook(None, mean_over_ranks)
    weight = model.module.weight
    optimizer = SGD(model.parameters(), lr=LR)
    events = traffic.events
    model.module.register_forward_pre_hook(lambda _, inputs: events.append(f"forward of {len(inputs[0])}"))
    weight.register_hook(lambda _: events.append("backward"))
    optimizer.register_step_pre_hook(lambda *_: events.append("step"))
    result = Result([], [])
    for step in range(len(MICRO_BATCHES_BY_STEP)):
        events.clear()
        before = weight.item()
        micro_batches = list(zip(*samples_of(step, dist.get_rank()), strict=True))
        solution.train_step(model, optimizer, micro_batches)
        result.events.append(list(events))
        result.gradients.append((before - weight.item()) / LR)
    return result


def check(actual: list[Result], expected: list[list[float]]) -> None:
    for number, count in enumerate(MICRO_BATCHES_BY_STEP):
        where = f"step {number + 1}, of {count} micro-batches"
        check_events(where, count, [result.events[number] for result in actual])
        gradients = [result.gradients[number] for result in actual]
        right = expected[0][number]
        if near(gradients, [right] * len(actual)):
            continue
        if near(gradients, [right * count] * len(actual)):
            sentence = "the micro-batches' gradients were added, not averaged. Divide each loss by len(micro_batches)"
        elif number > 0 and near(gradients, [right + expected[0][number - 1]] * len(actual)):
            sentence = "the gradient of the step before is still in it. Call zero_grad() once after each step"
        elif not any(gradients):
            sentence = "there is no gradient. Nothing may clear the gradients between backward and the step"
        else:
            sentence = "this is not the mean gradient over all samples of all micro-batches and ranks"
        raise Mistake(f"{where}: {sentence}", by_rank(gradients) | {"the gradient of the step should be": right})


def check_events(where: str, count: int, events_by_rank: list[list[str]]) -> None:
    """Raise a Mistake if the forwards, backwards, messages and optimizer steps of a rank are not in their order."""
    right = count * PASSES + MESSAGE + ["step"]
    for events in events_by_rank:
        if events == right:
            continue
        messages = events.count("all_reduce")
        if [event for event in events if event not in MESSAGE] != count * PASSES + ["step"]:
            sentence = "call forward and backward of one micro-batch after the other, then make one optimizer step"
        elif messages == 0:
            sentence = (
                "the gradients were not sent. Call the forward and the backward of the last micro-batch outside of "
                "model.no_sync(), and call `model`, not model.module, which goes past DDP"
            )
        elif messages > 1:
            sentence = (
                f"the gradients were sent {messages} times, and have to be sent once, by the backward of the last "
                "micro-batch. Call forward and backward of all others in model.no_sync()"
            )
        else:
            sentence = "the gradients were sent by the backward of an earlier micro-batch than the last"
        raise Mistake(f"{where}: {sentence}", by_rank(events_by_rank) | {"it should be": right})
