"""Ways to average the gradients of two ranks: `common.small.ddp`, torch's DDP, and what makes it send less often.

A rank trains `deep_net` on its own images with one of `WAYS`. The phases of a step bear names that torch's profiler
records, and that `benchmarks.suites.timeline` draws.
"""

import contextlib
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

from common.small.ddp import BucketedDDP, NaiveDDP, OverlappedDDP

IMAGE = (1, 28, 28)
CLASSES = 10
WIDTHS = (32, 64, 128, 192)
BLOCKS = 4  # of each width
BATCH = 8  # images of one rank and one backward
LEARNING_RATE = 3e-4
WARM_UP_STEPS = 2
NO_SYNC = "torch's DDP, no_sync"
# By name, the function that makes a replica of the network, which is a collective.
WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "naive": NaiveDDP,
    "overlapped": OverlappedDDP,
    "bucketed, 1 MiB": partial(BucketedDDP, bucket_mib=1),
    "torch's DDP": DistributedDataParallel,
    NO_SYNC: DistributedDataParallel,
}


def deep_net() -> nn.Sequential:
    """A network with 52 parameters of very different sizes, so that the order and the size of messages matter.

    BasicNet has eight parameters, and one of them holds 98 % of the bytes: whatever the size of a bucket, there is one
    large message. Here the last layers hold most of the 7.6 MB, as in most convolutional networks, and backward
    computes their gradients first.
    """
    before = WIDTHS[0]
    layers: list[nn.Module] = [nn.Conv2d(1, before, 3, padding=1)]
    for width in WIDTHS:
        for _ in range(BLOCKS):
            stride = 1 if width == before else 2
            layers.append(nn.Conv2d(before, width, 3, stride, padding=1, bias=False))
            # Not batch normalisation: DDP would send its running means too.
            layers += [nn.GroupNorm(8, width), nn.ReLU()]
            before = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, CLASSES), nn.LogSoftmax(dim=1)]
    return nn.Sequential(*layers)


class AveragedTraining:
    """`deep_net` on this rank, the gradients averaged in one of `WAYS`. The process group of all ranks must be there.

    Attributes:
        backwards: how many backwards a step of the optimizer has. All but the last run in `no_sync`.
    """

    def __init__(self, way: str) -> None:
        torch.manual_seed(0)  # the same weights on every rank
        self.model = WAYS[way](deep_net())
        self.backwards = 2 if way == NO_SYNC else 1
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)

    def step(self, images: Tensor, targets: Tensor) -> None:
        """One step of the optimizer.

        Args:
            images: of shape (backwards, N, 1, 28, 28), N images for each backward.
            targets: of shape (backwards, N).
        """
        with record_function("step"):
            for index in range(self.backwards):
                is_last = index == self.backwards - 1
                with contextlib.nullcontext() if is_last else self.model.no_sync():
                    with record_function("forward"):
                        loss = F.nll_loss(self.model(images[index]), targets[index])
                    with record_function("backward"):
                        loss.backward()
            if isinstance(self.model, NaiveDDP):
                with record_function("average_gradients"):
                    self.model.average_gradients()
            with record_function("optimizer"):
                self.optimizer.step()
                self.optimizer.zero_grad()


def warmed_up(way: str) -> Callable[[], None]:
    """A function that takes one step of this rank's training on noise, after a warm-up. A collective of all ranks.

    torch's DDP orders its buckets anew after the first step.
    """
    training = AveragedTraining(way)
    generator = torch.Generator().manual_seed(dist.get_rank())
    images = torch.randn(training.backwards, BATCH, *IMAGE, generator=generator)
    targets = torch.randint(CLASSES, (training.backwards, BATCH), generator=generator)
    step = partial(training.step, images, targets)
    for _ in range(WARM_UP_STEPS):
        step()
    dist.barrier()
    return step
