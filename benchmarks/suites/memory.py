"""Peak memory per device of DataParallel, DDP and FSDP2 on several devices, and where it goes.

Three steps of AdamW at the same global batch, with the wrappers that levels 01 and 02 use. Every tensor is charged to
its device by `common.memory`; DDP's ranks are real processes, each accounted for by itself.
"""

from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.options import TIMEOUT_SECONDS, WARM_UP_STEPS
from benchmarks.harness.replica_memory import track_replicas
from benchmarks.harness.rows import BUCKET_VIEWS, DATA_PARALLEL, DDP, FOREACH, FSDP2
from common.memory import label
from common.model import BasicNet
from common.process_group import process_group
from common.processes import ranks
from common.small.data_parallel import EmulatedDataParallel

STEPS = WARM_UP_STEPS + 1
DEVICES = (2, 4, 8)


@dataclass(frozen=True)
class ReferenceNetwork:
    """A network, by the function that builds it, and the shape of its batches."""

    title: str
    build: Callable[[], nn.Module]
    image: tuple[int, ...]  # the shape of one sample
    classes: int
    batch_size: int  # of all devices together
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy

    def batch(self) -> tuple[Tensor, Tensor]:
        """Noise of the right shape, (batch_size, *image), and as many labels."""
        return torch.randn(self.batch_size, *self.image), torch.randint(self.classes, (self.batch_size,))


def resnet18() -> nn.Module:
    """ResNet-18 for images of 32×32: its first convolution is 3×3 with stride 1, without the pooling after it."""
    from torchvision.models import resnet18

    model = resnet18(num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


def big_output() -> nn.Module:
    """A small trunk under 20,000 classes, as many as a vocabulary: for one sample the output has 80 kB."""
    return nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 20_000))


# Their memory goes to different places: the optimizer's state, activations, the output.
NETWORKS = {
    "basic_net": ReferenceNetwork("BasicNet", BasicNet, (1, 28, 28), 10, 64, F.nll_loss),
    "resnet18": ReferenceNetwork("ResNet-18", resnet18, (3, 32, 32), 10, 16),
    "big_output": ReferenceNetwork("20,000 classes", big_output, (256,), 20_000, 512),
}


def fully_sharded(model: nn.Module) -> nn.Module:
    """`model`, of which each rank keeps its part of every parameter; a layer is gathered when it computes."""
    # Importing it takes a second, which `benchmarks.compare` without --full does not need.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    kind = next(model.parameters()).device.type
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    for module in reversed(list(model.modules())):  # the innermost first
        if module is model or list(module.parameters(recurse=False)):
            fully_shard(module, mesh=mesh)
    return model


@dataclass(frozen=True)
class Wrapper:
    """A way to train a network on several devices."""

    wrap: Callable[..., nn.Module]  # gets a model, and where there are no ranks the number of devices
    has_ranks: bool = True  # each device has a process
    # AdamW takes all parameters at once, as it does on a GPU by default. Else it takes one after another, which needs
    # the same temporaries on every kind of device.
    foreach: bool = False


WRAPPERS = {
    DATA_PARALLEL: Wrapper(EmulatedDataParallel, has_ranks=False),
    DDP: Wrapper(DistributedDataParallel),
    FOREACH: Wrapper(DistributedDataParallel, foreach=True),
    # The gradients lie in DDP's buckets, not beside them.
    BUCKET_VIEWS: Wrapper(partial(DistributedDataParallel, gradient_as_bucket_view=True)),
    FSDP2: Wrapper(fully_sharded),
}


def train(network: ReferenceNetwork, device: torch.device, wrapper: Wrapper, devices: int) -> None:
    """STEPS steps as levels 01 and 02 take them. A rank of DDP or FSDP2 takes all, each on its share of the batch."""
    torch.manual_seed(0)
    model = network.build().to(device)
    model = wrapper.wrap(model) if wrapper.has_ranks else wrapper.wrap(model, devices)
    for parameter in model.parameters():
        label(parameter, "parameters")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=wrapper.foreach)
    for _ in range(STEPS):
        images, targets = network.batch()
        if wrapper.has_ranks:
            # In memory of their own, so that the global batch is not held.
            images = images.chunk(devices)[dist.get_rank()].clone()
            targets = targets.chunk(devices)[dist.get_rank()].clone()
        images = images.to(device)
        targets = targets.to(device)
        loss = network.loss(model(images), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def peaks_of_process(network: str, wrapper: str, devices: int) -> list[dict[str, int]]:
    """The bytes in each category at the peak of each of this process's devices. Names are keys of the tables above."""
    context = process_group("gloo") if WRAPPERS[wrapper].has_ranks else nullcontext()
    with context, track_replicas() as tracker:
        train(NETWORKS[network], torch.device("cpu"), WRAPPERS[wrapper], devices)
    return list(tracker.peaks().values())


@dataclass(frozen=True)
class MemoryRow:
    """The memory of a network in a wrapper; `peaks` has the bytes of each category on each device, in their order."""

    network: str
    title: str
    global_batch_size: int
    wrapper: str
    devices: int
    peaks: list[dict[str, int]]


def rows_on(devices: int, names: Collection[str], wrappers: Collection[str]) -> list[MemoryRow]:
    rows = []
    for wrapper in wrappers:
        processes = ranks(devices if WRAPPERS[wrapper].has_ranks else 1, on_cpu=True)
        for name in names:
            network = NETWORKS[name]
            by_process = processes.run(peaks_of_process, name, wrapper, devices, timeout=TIMEOUT_SECONDS)
            peaks = [*chain.from_iterable(by_process)]
            rows.append(MemoryRow(name, network.title, network.batch_size, wrapper, devices, peaks))
    return rows
