"""Peak memory per device of DataParallel, DDP and FSDP2 on several devices, and where it goes.

Three steps of AdamW at the same global batch, with the wrappers that levels 01 and 02 use. Every tensor is charged to
its device by `common.memory`; DDP's ranks are real processes, each accounted for by itself. Where the machine has
so many GPUs, the same steps run on them too, and CUDA's allocator says what it gave out at most.
"""

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.networks import NETWORKS, Network
from benchmarks.harness.rows import BUCKET_VIEWS, DATA_PARALLEL, DDP, FOREACH, FSDP
from common.memory import accounting, name_category
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

    @property
    def own_devices(self) -> range:
        """The indices of this process's devices."""
        if self.wrapper == DATA_PARALLEL:
            return range(self.devices)
        return range(dist.get_rank(), dist.get_rank() + 1)

    def wrap(self, network: Network, device: torch.device) -> nn.Module:
        """The network on `device` in the wrapper; DataParallel's replicas on as many GPUs where it is one."""
        model = network.build().to(device)
        if self.wrapper == DATA_PARALLEL:
            # One replica shares the model's device, so level 01 emulates it on a GPU too.
            if device.type == "cuda" and self.devices > 1:
                return nn.DataParallel(model, device_ids=list(self.own_devices))
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


def train(network: Network, device: torch.device, share: Share, steps: int = STEPS) -> None:
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


def accounted(names: list[str], share: Share) -> list[list[dict[str, int]]]:
    """Of each network, for each of this process's devices, the bytes in each category at its peak."""
    result = []
    for name in names:
        with accounting() as ledger:
            train(NETWORKS[name], torch.device("cpu"), share)
        result.append(list(ledger.peaks().values()))
    return result


class Allocated(NamedTuple):
    """A GPU's memory at its peak, in bytes.

    Attributes:
        allocated: what CUDA's allocator gave out at most, without `workspaces`.
        workspaces: what cuBLAS keeps for its own use, once for each stream: 8 MiB, or 32 on a Hopper.
    """

    allocated: int
    workspaces: int


def allocated(names: list[str], share: Share) -> list[list[Allocated]]:
    """For each network what CUDA's allocator gave out on each GPU of this process."""
    devices = share.own_devices
    first = torch.device("cuda", devices[0])
    result = []
    for name in names:
        train(NETWORKS[name], first, share, steps=1)  # libraries take what they keep
        for index in devices:
            torch.cuda.synchronize(index)
        # A wrapper's cycles keep the network before alive, and the allocator keeps its blocks.
        gc.collect()
        held = [torch.cuda.memory_allocated(index) for index in devices]
        torch._C._cuda_clearCublasWorkspaces()
        workspaces = {}
        for index, before in zip(devices, held, strict=True):
            workspaces[index] = before - torch.cuda.memory_allocated(index)
        torch.cuda.empty_cache()
        for index in devices:
            torch.cuda.reset_peak_memory_stats(index)
        train(NETWORKS[name], first, share)
        peaks = []
        for index in devices:
            torch.cuda.synchronize(index)
            own = torch.cuda.max_memory_allocated(index) - workspaces[index]
            peaks.append(Allocated(own, workspaces[index]))
        result.append(peaks)
    return result


def rows_on(devices: int, names: list[str], wrappers: tuple[str, ...] = WRAPPERS) -> list[dict]:
    """A row for each network and wrapper.

    `peaks` has the bytes of each category on each device, simulated. Of each GPU `allocated` is what CUDA's allocator
    gave out, and `workspaces` what cuBLAS had beside; both are None where there are not so many GPUs.
    """
    rows = []
    for wrapper in wrappers:
        simulated = on_devices(accounted, names, wrapper, devices, "gloo")
        real = [None] * len(names)
        if torch.cuda.device_count() >= devices:
            real = on_devices(allocated, names, wrapper, devices, "nccl")
        for name, peaks, on_gpus in zip(names, simulated, real, strict=True):
            network = NETWORKS[name]
            row = {
                "network": name,
                "title": network.title,
                "global_batch_size": network.batch_size,
                "wrapper": wrapper,
                "devices": devices,
                "peaks": peaks,
            }
            for fact in Allocated._fields:
                row[fact] = [getattr(peak, fact) for peak in on_gpus] if on_gpus else None
            rows.append(row)
    return rows


def on_devices(function: Callable, names: list[str], wrapper: str, devices: int, backend: str) -> list[list]:
    """`function` for the processes of a wrapper: of each network the results of all devices, in their order.

    Args:
        function: `accounted` or `allocated`.
    """
    processes = 1 if wrapper == DATA_PARALLEL else devices
    pool = ranks(processes, on_cpu=backend == "gloo")
    by_process = pool.run(_in_process, function, names, wrapper, devices, backend, timeout=TIMEOUT)
    found = []
    for of_processes in zip(*by_process, strict=True):
        found.append([device for of_process in of_processes for device in of_process])
    return found


def _in_process(function: Callable, names: list[str], wrapper: str, devices: int, backend: str) -> list[list]:
    if wrapper == DATA_PARALLEL:
        return function(names, Share(wrapper, devices))
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ["RANK"]))
    with process_group(backend):
        return function(names, Share(wrapper, devices))
