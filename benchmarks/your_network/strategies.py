"""The strategies to train one network on several devices, as they look from one process.

The process is rank 0 of a group whose other ranks are not there (torch's fake backend): its collectives return at once.
The memory that a rank allocates does not depend on what the others send. DataParallel is one process for all devices.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.harness.rows import DATA_PARALLEL, DDP
from benchmarks.your_network.errors import failing_as
from benchmarks.your_network.units import units
from benchmarks.your_network.user_network import UserNetwork, trainable, use_foreach
from common.memory import label
from common.small.data_parallel import EmulatedDataParallel

ZERO_1 = "ZeRO-1"
ZERO_2 = "ZeRO-2"
ZERO_3 = "ZeRO-3 / FSDP"
PARALLEL_STRATEGIES = (DATA_PARALLEL, DDP, ZERO_1, ZERO_2, ZERO_3)


@contextmanager
def fake_group(world_size: int) -> Iterator[DeviceMesh]:
    """This process as rank 0 of a group whose other ranks are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield init_device_mesh("cpu", (world_size,))
    finally:
        dist.destroy_process_group()


def wrap(model: nn.Module, strategy: str, mesh: DeviceMesh) -> nn.Module:
    """The model as the strategy trains it: ONE_DEVICE, or one of PARALLEL_STRATEGIES on the devices of `mesh`."""
    if strategy == DATA_PARALLEL:
        return SequentialDataParallel(model, mesh.size())
    if strategy in (DDP, ZERO_1):
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(None, _skip_all_reduce)
        return wrapped
    if strategy in (ZERO_2, ZERO_3):
        for part in dict.fromkeys([*units(model), model]):  # each once, if two parents have it
            fully_shard(part, mesh=mesh, reshard_after_forward=strategy == ZERO_3)
    return model


def make_optimizer(network: UserNetwork, model: nn.Module, strategy: str) -> torch.optim.Optimizer:
    """The network's optimizer for a wrapped model; under ZeRO-1 for the parameters that this rank is given."""
    if strategy == ZERO_1:
        with failing_as(f"the optimizer of {network.title} cannot be sharded"):
            optimizer = ZeroRedundancyOptimizer(trainable(model), network.optimizer)
    else:
        optimizer = network.make_optimizer(model)
    use_foreach(optimizer)
    return optimizer


class SequentialDataParallel(EmulatedDataParallel):
    """DataParallel whose replicas compute one after another: `without_computing` sees the operations of one thread."""

    def parallel_apply(self, replicas: list[nn.Module], shards: list[tuple[tuple, dict]]) -> list[Any]:
        return [replica(*args, **kwargs) for replica, (args, kwargs) in zip(replicas, shards, strict=True)]


def _skip_all_reduce(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A hook of DDP in place of the all-reduce: the fake group's has no result, and DDP asks for one."""
    label(bucket.buffer(), "communication")
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
