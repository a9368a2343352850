"""The checker of `accumulate`: what went through the network and over the link, and which weights came out."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.exercises.compare import agreed, flat, mistake, near, plain, side_by_side
from common.exercises.link import slow_link
from common.exercises.stage import in_rounds, load_name, on_ranks
from common.small.ddp.overlapped import OverlappedDDP

MINUTES = 15
READ = "common/small/ddp/README.md"
SAME_AS = "OverlappedDDP (common/small/ddp/overlapped.py), torch's DistributedDataParallel and one device"
WORLD_SIZES = (2, 3)
MICRO_BATCHES = (3, 2)  # by step
MICRO_BATCH_SIZE = 2
STEPS = len(MICRO_BATCHES)
LEARNING_RATE = 0.1

all_reduce = dist.all_reduce  # torch's own, whatever a solution's calls are replaced by


def network() -> nn.Linear:
    """One weight, 1 at first, so that it can be read."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(model.weight)
    return model


def samples(step: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All samples of a step, of all ranks."""
    generator = torch.Generator().manual_seed(step)
    count = world_size * MICRO_BATCHES[step] * MICRO_BATCH_SIZE
    inputs = torch.rand(count, 1, generator=generator).double()
    return inputs, 3 * inputs + torch.rand(count, 1, generator=generator)


def micro_batches_of(rank: int, step: int, world_size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    inputs, targets = samples(step, world_size)
    own_inputs = inputs[rank::world_size].split(MICRO_BATCH_SIZE)
    own_targets = targets[rank::world_size].split(MICRO_BATCH_SIZE)
    return list(zip(own_inputs, own_targets, strict=True))


class Observed:
    """A model in DDP that counts what is sent and notes each forward and backward, and its optimizer."""

    def __init__(self) -> None:
        self.model = DistributedDataParallel(network())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)
        self.sent = 0
        self.steps = 0
        self.samples_in_forward: list[int] = []
        self.synchronised_forwards: list[bool] = []
        self.synchronised_backwards: list[bool] = []
        self.graphs = 0  # of forwards whose backward has not come yet
        self.most_graphs = 0
        self.model.register_comm_hook(None, self.count_and_average)
        self.model.module.register_forward_pre_hook(self.note_forward)
        self.model.module.weight.register_hook(self.note_backward)
        self.optimizer.register_step_post_hook(self.note_step)

    def count_and_average(self, _: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        self.sent += 1
        message = bucket.buffer() / dist.get_world_size()
        work = all_reduce(message, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    def note_forward(self, _: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        self.samples_in_forward.append(len(inputs[0]))
        self.synchronised_forwards.append(self.model.require_backward_grad_sync)
        self.graphs += 1
        self.most_graphs = max(self.most_graphs, self.graphs)

    def note_backward(self, _: torch.Tensor) -> None:
        self.synchronised_backwards.append(self.model.require_backward_grad_sync)
        self.graphs -= 1

    def note_step(self, *_: Any) -> None:
        self.steps += 1


def trained(model: Any) -> list[float]:
    """The weight after each step of the small DDP or of torch's, by which a solution is measured."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    weights = []
    for step in range(STEPS):
        *earlier, last = micro_batches_of(rank, step, world_size)
        with model.no_sync():
            for inputs, targets in earlier:
                loss = F.mse_loss(model(inputs), targets) / MICRO_BATCHES[step]
                loss.backward()
        inputs, targets = last
        loss = F.mse_loss(model(inputs), targets) / MICRO_BATCHES[step]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        weights.append(model.module.weight.item())
    return weights


def averaged(micro_batches: int) -> float:
    """The factor of one micro-batch's gradient in the mean over so many of them."""
    return 1 / micro_batches


def added(_: int) -> float:
    return 1


def left_out(_: int) -> float:
    return 0


def on_one_device(
    world_size: int,
    last: Callable[[int], float] = averaged,
    earlier: Callable[[int], float] | None = None,
    keeps_old_gradients: bool = False,
) -> list[float]:
    """The weight after each step with all samples in one batch, as it should be or with one of the mistakes.

    Args:
        last: the factor of the last micro-batch's gradient, given the number of micro-batches.
        earlier: that of all others; by default the same.
    """
    weight = 1.0
    gradient = 0.0
    weights = []
    for step in range(STEPS):
        if not keeps_old_gradients:
            gradient = 0.0
        count = MICRO_BATCHES[step]
        for number in range(count):
            of_ranks = [micro_batches_of(rank, step, world_size)[number] for rank in range(world_size)]
            inputs = torch.cat([inputs for inputs, _ in of_ranks])
            targets = torch.cat([targets for _, targets in of_ranks])
            factor = last if number == count - 1 else earlier or last
            gradient += factor(count) * (2 * (weight * inputs - targets) * inputs).mean().item()
        weight -= LEARNING_RATE * gradient
        weights.append(weight)
    return weights


def run(path: str) -> dict:
    """On one rank: the weight after each step, and what happened in each."""
    expected = agreed(
        real=trained(DistributedDataParallel(network())),
        small=trained(OverlappedDDP(network())),
        one_device=on_one_device(dist.get_world_size()),
    )
    observed = Observed()
    weights = []
    sent = []
    sent_by_hand = []
    optimizer_steps = []
    with slow_link() as link:
        train_step = load_name(path, "train_step")
        for step in range(STEPS):
            micro_batches = micro_batches_of(dist.get_rank(), step, dist.get_world_size())
            train_step(observed.model, observed.optimizer, micro_batches)
            weights.append(plain(observed.model.module.weight)[0][0])
            sent.append(observed.sent)
            sent_by_hand.append(len(link.messages))
            optimizer_steps.append(observed.steps)
            observed.sent = 0
            observed.steps = 0
            link.messages.clear()
    return {
        "weights": weights,
        "expected": expected,
        "sent": sent,
        "sent_by_hand": sent_by_hand,
        "optimizer_steps": optimizer_steps,
        "most_graphs": observed.most_graphs,
        "samples_in_forward": observed.samples_in_forward,
        "synchronised_forwards": observed.synchronised_forwards,
        "synchronised_backwards": observed.synchronised_backwards,
    }


def check(path: Path) -> list[str]:
    """Two steps on two ranks and on three, with three micro-batches and with two."""

    def on(world_size: int) -> list[str | None]:
        results = on_ranks(world_size, run, path)
        return [wrong_forward(results) or wrong_steps(results) or wrong_traffic(results) or wrong_weights(results)]

    return in_rounds(WORLD_SIZES, on)


def wrong_forward(results: list[dict]) -> str | None:
    """A finding about the samples that went through the network at once."""
    graphs = [result["most_graphs"] for result in results]
    if max(graphs) > 1:
        title = (
            "several micro-batches were in memory at once, as much as of a large batch: a micro-batch's activations are"
            " kept until its backward, so call it before the forward of the next one. The gradients add up in `.grad`"
        )
        return side_by_side(f"{title}; forwards that waited for their backward:", graphs, it_should_be=1)
    sizes = [result["samples_in_forward"] for result in results]
    expected = [MICRO_BATCH_SIZE] * sum(MICRO_BATCHES)
    if near(sizes, [expected] * len(results)):
        return None
    title = "the network was not called once for each micro-batch"
    if any(size > MICRO_BATCH_SIZE for size in sizes[0]):
        title = (
            "several micro-batches went through the network at once: that needs the memory of a large batch, and"
            " accumulation is there for those who lack it"
        )
    return side_by_side(f"{title}; the samples of each forward:", sizes, they_should_be=expected)


def wrong_steps(results: list[dict]) -> str | None:
    """A finding about how often the optimizer made a step."""
    steps = [result["optimizer_steps"] for result in results]
    if steps == [[1] * STEPS] * len(results):
        return None
    title = "a train_step makes one optimizer step, after the backward of the last micro-batch and before zero_grad()"
    if steps == [list(MICRO_BATCHES)] * len(results):
        title = (
            "there was an optimizer step after each micro-batch, so nothing was accumulated: that is a training in"
            " small batches. Let the gradients of all micro-batches add up in `.grad`, which backward does by itself,"
            " and then make one step"
        )
    return side_by_side(f"{title}; the optimizer's steps in each train_step:", steps, they_should_be=[1] * STEPS)


def wrong_traffic(results: list[dict]) -> str | None:
    """A finding about how often gradients were sent."""
    sent = [result["sent"] for result in results]
    sent_by_hand = [result["sent_by_hand"] for result in results]
    if any(flat(sent_by_hand)) and not any(flat(sent)):
        if sent_by_hand == [[1] * STEPS] * len(results):
            return None
        title = "gradients were not sent once in each step by dist.all_reduce: send them once, after the last backward"
        return side_by_side(f"{title}; messages in each step:", sent_by_hand, they_should_be=[1] * STEPS)
    last = MICRO_BATCHES[0] - 1  # of the first step
    last_backward_sends = results[0]["synchronised_backwards"][last]
    last_forward_sends = results[0]["synchronised_forwards"][last]
    if sent == [[1] * STEPS] * len(results):
        if last_backward_sends:
            return None
        title = (
            "gradients were sent, but not in the backward of the last micro-batch. What later backwards add stays on"
            " its rank, and the ranks drift apart: the last one sends the sum of all, and stands outside no_sync(); the"
            " numbers of the backwards that sent, in each step:"
        )
        numbers = [backwards_that_sent(result["synchronised_backwards"]) for result in results]
        return side_by_side(title, numbers, they_should_be=[[count] for count in MICRO_BATCHES])
    elif sent[0][0] == 0 and last_backward_sends and last_forward_sends:
        title = "DDP has sent no gradient, because the forward went past DDP: call model(inputs), and not model.module"
    elif sent[0][0] == 0:
        title = (
            "DDP has sent no gradient: the last micro-batch, its forward through `model` too, belongs outside no_sync()"
        )
    elif not all(results[0]["synchronised_backwards"]) and all(results[0]["synchronised_forwards"]):
        title = (
            "gradients were sent in each backward, although it stands in no_sync(): the forward belongs into it too,"
            " because DDP decides in the forward whether the next backward sends"
        )
    else:
        title = (
            "gradients were sent more than once in a step: all micro-batches but the last one belong into"
            " `with model.no_sync():`, forward and backward"
        )
    return side_by_side(f"{title}; messages in each step:", sent, they_should_be=[1] * STEPS)


def backwards_that_sent(synchronised: list[bool]) -> list[list[int]]:
    """The numbers of these backwards in each step, from 1 on."""
    numbers = []
    for count in MICRO_BATCHES:
        numbers.append([number for number, sends in enumerate(synchronised[:count], start=1) if sends])
        synchronised = synchronised[count:]
    return numbers


def wrong_weights(results: list[dict]) -> str | None:
    """A finding about the weight after the steps."""
    world_size = len(results)
    weights = [result["weights"] for result in results]
    expected = results[0]["expected"]
    if near(weights, [expected] * world_size):
        return None
    with_mistake = partial(on_one_device, world_size)
    candidates = {
        "the gradients of the micro-batches were added and not averaged: divide each loss by the number of"
        " micro-batches": with_mistake(added),
        f"the losses were divided by {MICRO_BATCHES[0]} in each step, and a step may have another number of"
        " micro-batches: divide by len(micro_batches)": with_mistake(lambda count: 1 / MICRO_BATCHES[0]),
        "the old gradients were still there in the next step: call optimizer.zero_grad() once in each step":
        with_mistake(keeps_old_gradients=True),
        "only the last micro-batch has counted: zero_grad() belongs after the step, not between micro-batches":
        with_mistake(averaged, earlier=left_out),
    }  # fmt: skip
    known = mistake(weights, {sentence: [numbers] * world_size for sentence, numbers in candidates.items()})
    if known is None and near(weights, [[1.0] * STEPS] * world_size):
        known = "the weight has not moved: call optimizer.step() after the last backward, before zero_grad()"
    if known is None and not near(weights, weights[:1] * world_size):
        known = "the ranks have drifted apart: each has used gradients that the other has not seen"
    title = known or (
        "the weight is not that of one device with all samples of a step in one batch: divide each micro-batch's loss"
        " once, by the number of micro-batches, let the gradients add up, and make one step"
    )
    return side_by_side(f"{title}; the weight after each step:", weights, it_should_be=expected)
