"""The checker of `accumulate`: what went through the network and over the link, and which weights came out."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from common.exercises.compare import near, shown, side_by_side
from common.exercises.stage import SolutionFailed, load_name
from common.exercises.traffic import observed
from common.small.ddp.overlapped import OverlappedDDP

MINUTES = 15
READ = "common/small/ddp/README.md"
SAME_AS = "OverlappedDDP (common/small/ddp/overlapped.py)"
WORLD_SIZES = (2, 3)
MICRO_BATCHES = (3, 2)  # by step
MICRO_BATCH_SIZE = 2

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


class Observed:
    """A model in DDP and an optimizer that note what happens to them in a step."""

    def __init__(self) -> None:
        self.model = DistributedDataParallel(network())
        self.weight = self.model.module.weight
        self.optimizer = SGD(self.model.parameters(), lr=0.1)
        self.noted = self.begin()
        self.model.register_comm_hook(None, self.count_and_average)
        self.model.module.register_forward_pre_hook(self.note_forward)
        self.weight.register_hook(self.note_backward)
        self.optimizer.register_step_pre_hook(lambda *_: self.noted["stepped_with"].append(self.gradient()))

    def begin(self) -> dict[str, Any]:
        """What is noted in the step that begins now."""
        self.noted = {
            "samples": [],  # the number of them in each forward
            "gradients_before": [],  # each forward
            "forwards_send": [],  # was DDP to send, in each of them?
            "backwards_send": [],
            "most_graphs": 0,  # of forwards whose backward had not come yet
            "sent": 0,  # messages of DDP
            "stepped_with": [],  # the gradients of the optimizer's steps
        }
        return self.noted

    def gradient(self) -> float:
        return 0.0 if self.weight.grad is None else self.weight.grad.item()

    def count_and_average(self, _: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        self.noted["sent"] += 1
        message = bucket.buffer() / dist.get_world_size()
        work = all_reduce(message, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    def note_forward(self, _: nn.Module, inputs: tuple[Tensor]) -> None:
        self.noted["samples"].append(len(inputs[0]))
        self.noted["gradients_before"].append(self.gradient())
        self.noted["forwards_send"].append(self.model.require_backward_grad_sync)
        graphs = len(self.noted["samples"]) - len(self.noted["backwards_send"])
        self.noted["most_graphs"] = max(self.noted["most_graphs"], graphs)

    def note_backward(self, _: Tensor) -> None:
        self.noted["backwards_send"].append(self.model.require_backward_grad_sync)


def trained_by_the_small_one() -> list[dict]:
    """The gradient of each step, and the weight after it."""
    model: Any = OverlappedDDP(network())
    optimizer = SGD(model.parameters(), lr=0.1)
    steps = []
    for step, count in enumerate(MICRO_BATCHES):
        *earlier, (inputs, targets) = micro_batches_of(step)
        with model.no_sync():
            for its_inputs, its_targets in earlier:
                (F.mse_loss(model(its_inputs), its_targets) / count).backward()
        (F.mse_loss(model(inputs), targets) / count).backward()
        gradient = model.module.weight.grad.item()
        optimizer.step()
        optimizer.zero_grad()
        steps.append({"gradient": gradient, "weight": model.module.weight.item()})
    return steps


def run(path: str) -> list[dict]:
    """On one rank: what happened in each step, and what is right."""
    right_ones = trained_by_the_small_one()
    training = Observed()
    steps = []
    with observed() as traffic:
        train_step = load_name(path, "train_step")
        for step, right in enumerate(right_ones):
            noted = training.begin()
            sent_before = len(traffic.messages)
            micro_batches = micro_batches_of(step)
            train_step(training.model, training.optimizer, micro_batches)
            if len(micro_batches) != MICRO_BATCHES[step]:
                raise SolutionFailed("the list of micro-batches has changed: leave it to the caller as it is")
            after = training.weight.item()
            steps.append({**noted, **right, "after": after, "sent_by_hand": len(traffic.messages) - sent_before})
    return steps


def finding(results: list[list[dict]]) -> str | None:
    """What is wrong in the first step where something is."""
    for number, count in enumerate(MICRO_BATCHES):
        steps = [result[number] for result in results]
        found = wrong_forward(steps, count) or wrong_steps(steps) or wrong_traffic(steps)
        found = found or wrong_weight(steps, count)
        if found:
            return f"in step {number + 1}, of {count} micro-batches, {found}"
    return None


def wrong_forward(steps: list[dict], count: int) -> str | None:
    """A finding about the samples that went through the network at once."""
    samples = [step["samples"] for step in steps]
    expected = [MICRO_BATCH_SIZE] * count
    most_graphs = max(step["most_graphs"] for step in steps)
    if samples == [expected] * len(steps) and most_graphs == 1:
        return None
    title = (
        "several micro-batches were in memory at once, as much as of a large batch, and accumulation is there for those"
        " who lack it: call the forward and then the backward of each one, and the gradients add up in `.grad`"
    )
    return side_by_side(f"{title}; the samples of each forward:", samples, they_should_be=expected)


def wrong_steps(steps: list[dict]) -> str | None:
    """A finding about how often the optimizer made a step."""
    made = [len(step["stepped_with"]) for step in steps]
    if made == [1] * len(steps):
        return None
    title = (
        "a train_step makes one optimizer step, after the backward of the last micro-batch and before zero_grad(): the"
        " gradients of all micro-batches add up in `.grad`, which backward does by itself"
    )
    return side_by_side(f"{title}; the optimizer's steps:", made, they_should_be=1)


def wrong_traffic(steps: list[dict]) -> str | None:
    """A finding about how often gradients were sent."""
    first = steps[0]
    sent = [step["sent"] + step["sent_by_hand"] for step in steps]
    if sent == [1] * len(steps) and (first["sent_by_hand"] or first["backwards_send"][-1]):
        return None
    if sent[0] == 0 and first["backwards_send"][-1] and first["forwards_send"][-1]:
        title = "DDP has sent no gradient, because the forward went past DDP: call model(inputs), and not model.module"
    else:
        sending = [number for number, sends in enumerate(first["backwards_send"], start=1) if sends]
        title = (
            "the gradients have to be sent once, by the backward of the last micro-batch, which sends the sum of all:"
            " the others belong into `with model.no_sync():`, forward and backward, and the last one outside, because"
            " DDP decides in the forward whether the next backward sends. Outside of no_sync() were the backwards"
            f" {shown(sending)}"
        )
    return side_by_side(f"{title}; messages in this step:", sent, they_should_be=1)


def wrong_weight(steps: list[dict], count: int) -> str | None:
    """A finding about the weight after the step."""
    after = [step["after"] for step in steps]
    expected = steps[0]["weight"]
    if near(after, [expected] * len(steps)):
        return None
    title = (
        "the weight is not that of one device with all samples in one batch: divide each micro-batch's loss once, by"
        " len(micro_batches) (DDP averages over the ranks), let the gradients add up, and make one step"
    )
    [stepped_with] = steps[0]["stepped_with"]
    before, *later = steps[0]["gradients_before"]
    if near(stepped_with, 0.0):
        title = "the weight has not moved: call optimizer.step() after the last backward, before zero_grad()"
    elif before:
        title = "the old gradients were still there: call optimizer.zero_grad() once in each step"
    elif 0.0 in later:
        title = "only the last micro-batch has counted: zero_grad() belongs after the step, not between micro-batches"
    elif near(stepped_with, count * steps[0]["gradient"]):
        title = "the gradients of the micro-batches were added and not averaged: divide each loss by their number"
    return side_by_side(f"{title}; the weight after the step:", after, it_should_be=expected)
