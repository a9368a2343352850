"""Peak memory per device of DataParallel, DDP and FSDP2 on several devices, and where it goes.

Three steps of AdamW at the same global batch, with the wrappers that levels 01 and 02 use. Every tensor is charged to
its device by `common.memory`; DDP's ranks are real processes, each accounted for by itself.
"""

from contextlib import nullcontext
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.networks import NETWORKS, ReferenceNetwork
from benchmarks.harness.options import MeasureOptions
from benchmarks.harness.replica_memory import track_replicas
from benchmarks.harness.rows import BUCKET_VIEWS, DATA_PARALLEL, DDP, FOREACH, FSDP
from common.memory import name_category
from common.process_group import process_group
from common.processes import ranks
from common.small.data_parallel import EmulatedDataParallel

STEPS = 3  # the optimizer's state is there from the second on, DDP's final buckets in the second
TIMEOUT = 300  # seconds, for the ranks of one world size
DEVICES = (2, 4, 8)
WRAPPERS = (DATA_PARALLEL, DDP)
ALL_WRAPPERS = (
    *WRAPPERS,
    FOREACH,  # how AdamW computes on a GPU unless it is told otherwise: all parameters at once
    BUCKET_VIEWS,  # gradient_as_bucket_view: the gradients lie in DDP's buckets, not beside them
    FSDP,
)


def wrapped(model: nn.Module, wrapper: str, devices: int) -> nn.Module:
    """The model in one of ALL_WRAPPERS, on one of `devices` ranks, or under DataParallel on all devices."""
    if wrapper == DATA_PARALLEL:
        return EmulatedDataParallel(model, devices)
    if wrapper == FSDP:
        return fully_sharded(model)
    return DistributedDataParallel(model, gradient_as_bucket_view=wrapper == BUCKET_VIEWS)


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


def train(network: ReferenceNetwork, device: torch.device, wrapper: str, devices: int) -> None:
    """STEPS steps as levels 01 and 02 take them; under DDP this rank's share of them."""
    torch.manual_seed(0)
    model = wrapped(network.build().to(device), wrapper, devices)
    for parameter in model.parameters():
        name_category(parameter, "parameters")
    # One parameter after the other, unless asked: the same temporaries on every kind of device.
    optimizer = torch.optim.AdamW(model.parameters(), foreach=wrapper == FOREACH)
    for _ in range(STEPS):
        images, targets = network.batch()
        if wrapper != DATA_PARALLEL:
            # In memory of their own, so that the global batch is not held.
            images = images.chunk(devices)[dist.get_rank()].clone()
            targets = targets.chunk(devices)[dist.get_rank()].clone()
        images = images.to(device)
        targets = targets.to(device)
        loss = network.loss(model(images), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def peaks_of_process(name: str, wrapper: str, devices: int) -> list[dict[str, int]]:
    """For each of this process's devices, the bytes in each category at its peak."""
    group = nullcontext() if wrapper == DATA_PARALLEL else process_group("gloo")
    with group, track_replicas() as tracker:
        train(NETWORKS[name], torch.device("cpu"), wrapper, devices)
    return list(tracker.peaks().values())


def rows_on(devices: int, names: list[str], wrappers: tuple[str, ...] = WRAPPERS) -> list[dict]:
    """A row for each network and wrapper; `peaks` has the bytes of each category on each device, in their order."""
    rows = []
    for wrapper in wrappers:
        processes = ranks(1 if wrapper == DATA_PARALLEL else devices, on_cpu=True)
        for name in names:
            network = NETWORKS[name]
            by_process = processes.run(peaks_of_process, name, wrapper, devices, timeout=TIMEOUT)
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


def measure(options: MeasureOptions) -> dict:
    """The rows of all networks and wrappers; with --quick of one network on two devices."""
    if options.quick:
        return {"memory": rows_on(2, ["basic_net"], ALL_WRAPPERS)}
    rows = []
    for devices in DEVICES:
        rows += rows_on(devices, list(NETWORKS), ALL_WRAPPERS)
    return {"memory": rows}
