"""Ways to average the gradients of two ranks: `common.small.ddp`, torch's DDP, and what makes it send less.

A rank trains DeepNet on its own images with one of `WAYS`. The phases of a step bear names that torch's profiler
records, so that `benchmarks.suites.timeline` sees the same step that `benchmarks.suites.overlap` times.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

from benchmarks.harness.deep_net import CLASSES, IMAGE, DeepNet
from common.small.ddp import BucketedDDP, NaiveDDP, OverlappedDDP

BATCH = 8  # images of one rank and one backward
LEARNING_RATE = 3e-4
WARM_UP_STEPS = 2
MIB = 2**20
# torch closes a bucket when it holds at least so much: with one byte each gradient is a bucket of its own.
ONE_PARAMETER = 1 / MIB
EVERYTHING = 1024  # MiB
POWER_SGD_RANK = 2
# PowerSGD averages the first gradients whole. torch refuses less than 2.
POWER_SGD_STARTS = 2


@dataclass(frozen=True)
class Way:
    """One way to average gradients.

    Attributes:
        wrap: makes a replica of the network; a collective, except for the network as it is.
        backwards: how many backwards a step of the optimizer has. All but the last run in `no_sync`.
        compresses: whether the ranks exchange less than the gradients; the weights are then others.
        averages: whether the ranks exchange gradients. Where they do not, they meet after each step nevertheless:
            otherwise the wait for a slower rank would count as a cost of averaging.
    """

    wrap: Callable[[nn.Module], nn.Module]
    backwards: int = 1
    compresses: bool = False
    averages: bool = True


def in_torchs_buckets(bucket_cap_mb: float | None = None) -> Callable[[nn.Module], nn.Module]:
    """torch's DDP with buckets of so many MiB, by default 25 after a first one of 1."""

    def wrap(network: nn.Module) -> nn.Module:
        # Only an argument that is not given leaves torch 2.11 its default, with the small first bucket.
        if bucket_cap_mb is None:
            return DistributedDataParallel(network)
        return DistributedDataParallel(network, bucket_cap_mb=bucket_cap_mb)

    return wrap


def compressed(hook: Callable) -> Callable[[nn.Module], nn.Module]:
    """torch's DDP whose buckets travel in another format."""

    def wrap(network: nn.Module) -> nn.Module:
        model = DistributedDataParallel(network)
        model.register_comm_hook(None, hook)
        return model

    return wrap


def in_power_sgd(network: nn.Module) -> nn.Module:
    """torch's DDP that sends two thin matrices in place of each gradient.

    All gradients are in one bucket: the hook starts its second and third all-reduce from gloo's threads, whose order
    may differ from rank to rank where there are several buckets. gloo then ends the process: "Is there a distributed
    collective mismatch in your code?"
    """
    model = DistributedDataParallel(network, bucket_cap_mb=EVERYTHING)
    state = PowerSGDState(None, POWER_SGD_RANK, POWER_SGD_STARTS)
    model.register_comm_hook(state, powerSGD_hook)
    return model


def alone(network: nn.Module) -> nn.Module:
    """The network as it is: the ranks exchange nothing, and their weights drift apart."""
    return network


ALONE = "no averaging"
ALONE_TWICE = "no averaging, two backwards"
NAIVE = "naive"
OVERLAPPED = "overlapped"
BUCKETED = "bucketed, 1 MiB"
TORCH = "torch's DDP"
NO_SYNC = "torch's DDP, no_sync"
WAYS: dict[str, Way] = {
    ALONE: Way(alone, averages=False),
    ALONE_TWICE: Way(alone, backwards=2, averages=False),
    NAIVE: Way(NaiveDDP),
    OVERLAPPED: Way(OverlappedDDP),
    BUCKETED: Way(lambda network: BucketedDDP(network, bucket_mib=1)),
    "torch's, one per parameter": Way(in_torchs_buckets(ONE_PARAMETER)),
    "torch's, 0.25 MiB": Way(in_torchs_buckets(0.25)),
    "torch's, 1 MiB": Way(in_torchs_buckets(1)),
    TORCH: Way(in_torchs_buckets()),
    "torch's, one for all": Way(in_torchs_buckets(EVERYTHING)),
    NO_SYNC: Way(in_torchs_buckets(), backwards=2),
    "fp16": Way(compressed(fp16_compress_hook), compresses=True),
    "bf16": Way(compressed(bf16_compress_hook), compresses=True),
    "PowerSGD": Way(in_power_sgd, compresses=True),
}


def baseline(way: str) -> str:
    """The way that computes the same as `way` and averages nothing."""
    return ALONE if WAYS[way].backwards == 1 else ALONE_TWICE


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

    PowerSGD sends its first gradients whole, and torch's DDP orders its buckets anew after the first step.
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
