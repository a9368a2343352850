"""Steps by which two ranks average their gradients: with `common.small.ddp`, and with torch's DDP."""

import contextlib
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

from benchmarks.harness.lanes.record_steps import record
from benchmarks.harness.lanes.spans import ALL_REDUCE, BACKWARD, FORWARD, RecordedStep
from benchmarks.harness.options import WARM_UP_STEPS
from common.process_group import process_group
from common.small.ddp import BucketedDDP, NaiveDDP, OverlappedDDP

IMAGE = (1, 28, 28)
CLASSES = 10
WIDTHS = (32, 64, 128, 192)
BLOCKS_PER_WIDTH = 4
IMAGES_PER_BACKWARD = 8
LEARNING_RATE = 3e-4
NO_SYNC = "torch's DDP, no_sync"
# Ways to average gradients: each makes a replica of a network, which is a collective.
WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "naive": NaiveDDP,
    "overlapped": OverlappedDDP,
    "bucketed, 1 MiB": partial(BucketedDDP, bucket_mib=1),
    "torch's DDP": DistributedDataParallel,
    NO_SYNC: DistributedDataParallel,  # two backwards in a step of the optimizer; only the last one sends
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
        for _ in range(BLOCKS_PER_WIDTH):
            stride = 1 if width == before else 2
            layers.append(nn.Conv2d(before, width, 3, stride, padding=1, bias=False))
            # Not batch normalisation: DDP would send its running means too.
            layers += [nn.GroupNorm(8, width), nn.ReLU()]
            before = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, CLASSES), nn.LogSoftmax(dim=1)]
    return nn.Sequential(*layers)


def record_rank(name: str, steps: int) -> list[RecordedStep]:
    """Some steps of `deep_net` in a wrapper of WRAPPERS, on noise of this rank, after a warm-up. A collective."""
    with process_group():
        torch.manual_seed(0)  # the same weights on every rank
        model = WRAPPERS[name](deep_net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        generator = torch.Generator().manual_seed(dist.get_rank())
        backwards = 2 if name == NO_SYNC else 1
        images = torch.randn(backwards, IMAGES_PER_BACKWARD, *IMAGE, generator=generator)
        targets = torch.randint(CLASSES, (backwards, IMAGES_PER_BACKWARD), generator=generator)
        take_steps(WARM_UP_STEPS, model, optimizer, images, targets)
        dist.barrier()
        take_recorded = partial(take_steps, 1 + steps, model, optimizer, images, targets)
        (recorded,) = record(take_recorded, sending=ALL_REDUCE)
        return recorded


def take_steps(count: int, model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, targets: Tensor) -> None:
    """`count` steps of the optimizer on one batch: images (backwards, N, 1, 28, 28) and targets (backwards, N)."""
    last = len(images) - 1
    for _ in range(count):
        for index in range(len(images)):
            with contextlib.nullcontext() if index == last else model.no_sync():
                with record_function(FORWARD):
                    loss = F.nll_loss(model(images[index]), targets[index])
                with record_function(BACKWARD):
                    loss.backward()
        if isinstance(model, NaiveDDP):
            model.average_gradients()
        optimizer.step()
        optimizer.zero_grad()
