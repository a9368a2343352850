"""The ways to train one network on several devices, as they look from one process: how each wraps model and optimizer.

The process is one rank of a group that has no other members (torch's fake backend): its collectives return at once.
What a rank allocates does not depend on what the others send. DataParallel is one process for all devices.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.harness.rows import DATA_PARALLEL, DDP, ONE_DEVICE
from benchmarks.your_network import training
from benchmarks.your_network.spec import UserNetwork
from common.memory import name_category
from common.small.data_parallel import EmulatedDataParallel

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class Strategy:
    """A way to train on several devices.

    Attributes:
        name: for tables.
        wrap: makes of the model, which lies on its device, and of the group's mesh the model that is trained.
        make_optimizer: of the network, for that model.
        cuts_inputs: whether one process has the inputs of all devices and cuts them, as DataParallel's has.
    """

    name: str
    wrap: Callable[[nn.Module, DeviceMesh], nn.Module]
    make_optimizer: Callable[[UserNetwork, nn.Module], Any]
    cuts_inputs: bool = False


class OneAfterTheOther(EmulatedDataParallel):
    """DataParallel without threads: tensors whose memory is never used are of one thread."""

    def _parallel_apply(self, replicas: list[nn.Module], shards: list[tuple[tuple, dict]]) -> list[Any]:
        return [replica(*args, **kwargs) for replica, (args, kwargs) in zip(replicas, shards, strict=True)]


def _data_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return OneAfterTheOther(model, mesh.size())


def _ddp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, _averaged_already)
    return wrapped


def _averaged_already(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A hook in place of the all-reduce, of whose result the fake group would say nothing."""
    name_category(bucket.buffer(), "communication")
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _fully_sharded(model: nn.Module, mesh: DeviceMesh, reshard_after_forward: bool) -> nn.Module:
    for unit in units(model):
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard_after_forward)
    return model


def units(model: nn.Module) -> list[nn.Module]:
    """The parts that FSDP gathers, or checkpointing repeats, one at a time: the elements of Sequential and ModuleList.

    An element that is a container of such elements itself is opened. One that chains single layers is a block, as a
    U-Net's are, and stays whole: to keep each layer's input would save nothing. What lies deeper belongs to it.
    """
    found = []
    for child in model.children():
        if type(model) in _CONTAINERS and not _contains_blocks(child):
            if list(child.parameters()):
                found.append(child)
        else:
            found += units(child)
    return found


def _contains_blocks(module: nn.Module) -> bool:
    if type(module) not in _CONTAINERS:
        return False
    return any(list(element.children()) for element in module.children())


def checkpointed(model: nn.Module) -> nn.Module:
    """`model`, whose units keep their inputs only and compute again in backward."""
    chosen = set(units(model))
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if child in chosen:
                setattr(parent, name, checkpoint_wrapper(child))
    return model


@contextmanager
def lone_rank(world_size: int) -> Iterator[DeviceMesh]:
    """This process as rank 0 of a group without other members."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield init_device_mesh("cpu", (world_size,))
    finally:
        dist.destroy_process_group()


def _whole(network: UserNetwork, model: nn.Module) -> torch.optim.Optimizer:
    """The network's optimizer, for all parameters."""
    return training.make_optimizer(network, training.trainable(model))


def _by_parameters(network: UserNetwork, model: nn.Module) -> ZeroRedundancyOptimizer:
    """The network's optimizer, for the parameters that ZeRO-1 gives to this rank."""
    with training.step_failure(f"the optimizer of {network.title} cannot be sharded"):
        optimizer = ZeroRedundancyOptimizer(training.trainable(model), network.optimizer)
    training.use_foreach(optimizer.optim)
    return optimizer


ONE_DEVICE_STRATEGY = Strategy(ONE_DEVICE, lambda model, _: model, _whole)
DATA_PARALLEL_STRATEGY = Strategy(DATA_PARALLEL, _data_parallel, _whole, cuts_inputs=True)
DDP_STRATEGY = Strategy(DDP, _ddp, _whole)
ZERO_1 = Strategy("ZeRO-1", _ddp, _by_parameters)
ZERO_2 = Strategy("ZeRO-2", partial(_fully_sharded, reshard_after_forward=False), _whole)
ZERO_3 = Strategy("ZeRO-3 / FSDP", partial(_fully_sharded, reshard_after_forward=True), _whole)
ON_SEVERAL = (DATA_PARALLEL_STRATEGY, DDP_STRATEGY, ZERO_1, ZERO_2, ZERO_3)
