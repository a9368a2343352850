"""Ways to average the gradients of two ranks: `common.small.ddp`, torch's DDP, and what makes it send less.

A rank trains DeepNet on its own images with one of `WAYS`. The phases of a step bear names that torch's profiler
records, and that `benchmarks.suites.timeline` draws.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

from benchmarks.harness.deep_net import CLASSES, IMAGE, DeepNet
from common.small.ddp import BucketedDDP, NaiveDDP, OverlappedDDP

BATCH = 8  # images of one rank and one backward
LEARNING_RATE = 3e-4
WARM_UP_STEPS = 2


@dataclass(frozen=True)
class Way:
    """One way to average gradients.

    Attributes:
        wrap: makes a replica of the network; a collective, except for the network as it is.
        backwards: how many backwards a step of the optimizer has. All but the last run in `no_sync`.
        averages: whether the ranks exchange gradients. Where they do not, they meet after each step nevertheless:
            otherwise the wait for a slower rank would count as a cost of averaging.
    """

    wrap: Callable[[nn.Module], nn.Module]
    backwards: int = 1
    averages: bool = True


def in_fp16(network: nn.Module) -> nn.Module:
    """torch's DDP whose gradients travel in 16 bits."""
    model = DistributedDataParallel(network)
    model.register_comm_hook(None, fp16_compress_hook)
    return model


def alone(network: nn.Module) -> nn.Module:
    """The network as it is: the ranks exchange nothing, and their weights drift apart."""
    return network


WAYS: dict[str, Way] = {
    "no averaging": Way(alone, averages=False),
    "naive": Way(NaiveDDP),
    "overlapped": Way(OverlappedDDP),
    "bucketed, 1 MiB": Way(lambda network: BucketedDDP(network, bucket_mib=1)),
    "torch's DDP": Way(DistributedDataParallel),
    "torch's DDP, no_sync": Way(DistributedDataParallel, backwards=2),
    "torch's DDP, fp16": Way(in_fp16),
}


class AveragedTraining:
    """DeepNet on this rank, the gradients averaged in one of `WAYS`. The process group of all ranks must be there."""

    def __init__(self, way: str) -> None:
        self.way = WAYS[way]
        torch.manual_seed(0)  # the same weights on every rank
        self.network = DeepNet()
        self.model = self.way.wrap(self.network)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)

    def step(self, images: Tensor, targets: Tensor) -> None:
        """One step of the optimizer.

        Args:
            images: of shape (backwards, N, 1, 28, 28), N images for each backward.
            targets: of shape (backwards, N).
        """
        with record_function("step"):
            last = self.way.backwards - 1
            for index in range(self.way.backwards):
                with self._synchronised(index == last):
                    self._backward(images[index], targets[index])
            if isinstance(self.model, NaiveDDP):
                with record_function("average_gradients"):
                    self.model.average_gradients()
            with record_function("optimizer"):
                self.optimizer.step()
                self.optimizer.zero_grad()
            if not self.way.averages:
                dist.barrier()

    def _synchronised(self, is_last: bool) -> contextlib.AbstractContextManager:
        """A context in which gradients are averaged if it is the step's last backward."""
        if is_last or not self.way.averages:
            return contextlib.nullcontext()
        return self.model.no_sync()

    def _backward(self, images: Tensor, targets: Tensor) -> None:
        with record_function("forward"):
            loss = F.nll_loss(self.model(images), targets)
        with record_function("backward"):
            loss.backward()


def warmed_up(way: str) -> Callable[[], None]:
    """A function that takes one step of this rank's training on noise, after a warm-up. A collective of all ranks.

    torch's DDP orders its buckets anew after the first step.
    """
    training = AveragedTraining(way)
    images, targets = noise(way, dist.get_rank())
    step = partial(training.step, images, targets)
    for _ in range(WARM_UP_STEPS):
        step()
    dist.barrier()
    return step


def noise(way: str, rank: int) -> tuple[Tensor, Tensor]:
    """Images and targets for one step of this rank, as `AveragedTraining.step` takes them."""
    generator = torch.Generator().manual_seed(rank)
    backwards = WAYS[way].backwards
    images = torch.randn(backwards, BATCH, *IMAGE, generator=generator)
    targets = torch.randint(CLASSES, (backwards, BATCH), generator=generator)
    return images, targets
