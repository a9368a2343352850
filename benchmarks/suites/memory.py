"""Peak memory per device of DataParallel, DDP and FSDP2 on several devices, and where it goes.

Three steps of AdamW at the same global batch, with the wrappers that levels 01 and 02 use. Every tensor is charged to
its device by `common.memory`; DDP's ranks are real processes, each accounted for by itself.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.networks import NETWORKS, ReferenceNetwork
from benchmarks.harness.replica_memory import track_replicas
from benchmarks.harness.rows import BUCKET_VIEWS, DATA_PARALLEL, DDP, FOREACH, FSDP
from common.memory import name_category
from common.process_group import process_group
from common.processes import ranks
from common.small.data_parallel import EmulatedDataParallel

STEPS = 3  # the optimizer's state is there from the second on, DDP's final buckets in the second
TIMEOUT = 300  # seconds, for the ranks of one world size
WRAPPERS = (DATA_PARALLEL, DDP)
ALL_WRAPPERS = (
    *WRAPPERS,
    FOREACH,  # how AdamW computes on a GPU unless it is told otherwise: all parameters at once
    BUCKET_VIEWS,  # gradient_as_bucket_view: the gradients lie in DDP's buckets, not beside them
    FSDP,
)


@dataclass(frozen=True)
class Share:
    """The devices that one process stands for under a wrapper: a rank for one, DataParallel's process for all."""

    wrapper: str
    devices: int

    def wrap(self, network: ReferenceNetwork, device: torch.device) -> nn.Module:
        """The network on `device` in the wrapper."""
        model = network.build().to(device)
        if self.wrapper == DATA_PARALLEL:
            return EmulatedDataParallel(model, self.devices)
        if self.wrapper == FSDP:
            return fully_sharded(model)
        return DistributedDataParallel(model, gradient_as_bucket_view=self.wrapper == BUCKET_VIEWS)

    def of_batch(self, part: Tensor) -> Tensor:
        """This process's samples of a global batch, in memory of their own."""
        if self.wrapper != DATA_PARALLEL:
            part = part.chunk(self.devices)[dist.get_rank()]
        return part.clone()


def fully_sharded(model: nn.Module) -> nn.Module:
    """`model`, of which each rank keeps its part of every parameter; a layer is gathered when it computes."""
    # Importing it takes a second, which `benchmarks.compare` does not need.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    kind = next(model.parameters()).device.type
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    for module in reversed(list(model.modules())):  # the innermost first
        if module is model or list(module.parameters(recurse=False)):
            fully_shard(module, mesh=mesh)
    return model


def train(network: ReferenceNetwork, device: torch.device, share: Share, steps: int = STEPS) -> None:
    """A few steps as levels 01 and 02 take them; under DDP this rank's share of them."""
    torch.manual_seed(0)
    model = share.wrap(network, device)
    for parameter in model.parameters():
        name_category(parameter, "parameters")
    # One parameter after the other, unless asked: the same temporaries on every kind of device.
    optimizer = torch.optim.AdamW(model.parameters(), foreach=share.wrapper == FOREACH)
    for _ in range(steps):
        all_images, all_targets = network.batch()
        images = share.of_batch(all_images).to(device)
        targets = share.of_batch(all_targets).to(device)
        del all_images, all_targets
        loss = network.loss(model(images), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def peaks_of_process(name: str, share: Share) -> list[dict[str, int]]:
    """For each of this process's devices, the bytes in each category at its peak."""
    group = nullcontext() if share.wrapper == DATA_PARALLEL else process_group("gloo")
    with group, track_replicas() as tracker:
        train(NETWORKS[name], torch.device("cpu"), share)
    return list(tracker.peaks().values())


def rows_on(devices: int, names: list[str], wrappers: tuple[str, ...] = WRAPPERS) -> list[dict]:
    """A row for each network and wrapper; `peaks` has the bytes of each category on each device, in their order."""
    rows = []
    for wrapper in wrappers:
        processes = ranks(1 if wrapper == DATA_PARALLEL else devices, on_cpu=True)
        for name in names:
            network = NETWORKS[name]
            by_process = processes.run(peaks_of_process, name, Share(wrapper, devices), timeout=TIMEOUT)
            row = {
                "network": name,
                "title": network.title,
                "global_batch_size": network.batch_size,
                "wrapper": wrapper,
                "devices": devices,
                "peaks": list(chain.from_iterable(by_process)),
            }
            rows.append(row)
    return rows
