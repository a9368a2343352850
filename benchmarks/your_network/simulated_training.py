"""The memory of a training step under each strategy, on a machine that has neither the devices nor the memory.

This process is rank 0 of a group whose other ranks are not there (torch's fake backend): its collectives return at
once. The memory that a rank allocates does not depend on what the others send. Under DataParallel, which has one
process, this process stands for all devices.
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

from benchmarks.harness.options import WARM_UP_STEPS
from benchmarks.harness.replica_memory import track_replicas
from benchmarks.harness.rows import DATA_PARALLEL, DDP
from benchmarks.your_network.errors import failing_as
from benchmarks.your_network.strategies import ZERO_1, ZERO_2, ZERO_3, Setting
from benchmarks.your_network.units import units
from benchmarks.your_network.user_network import SMALLEST_BATCH, UserNetwork, trainable, use_foreach
from benchmarks.your_network.without_computing import without_computing
from common.memory import MemoryTracker, label
from common.small.data_parallel import EmulatedDataParallel

# The bytes by category of each device of this process at its peak: of a rank, or of all replicas.
Peaks = list[dict[str, int]]


@contextmanager
def simulated_training(network: UserNetwork, setting: Setting) -> Iterator["Training"]:
    """A training on rank 0 of a fake group, which computes nothing, after a warm-up. Raises what `Training` raises."""
    with fake_group(setting.devices) as mesh, without_computing(), track_replicas() as tracker:
        training = Training(network, setting, mesh, tracker)
        training.warm_up()
        yield training


@contextmanager
def fake_group(world_size: int) -> Iterator[DeviceMesh]:
    """This process as rank 0 of a group whose other ranks are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield init_device_mesh("cpu", (world_size,))
    finally:
        dist.destroy_process_group()


class Training:
    """The training of a network on one process, with a batch of any size.

    The process is a rank of `mesh`, or stands for all of its devices under DataParallel. `tracker` charges what it
    allocates to its devices.

    Raises:
        StepFailed: if the strategy cannot take the network; or if the network, its batch or its loss does not work.
    """

    def __init__(self, network: UserNetwork, setting: Setting, mesh: DeviceMesh, tracker: MemoryTracker) -> None:
        self.network = network
        self.setting = setting
        self.tracker = tracker
        model = network.make_model()
        with failing_as(f"{setting.strategy} cannot wrap {network.title}"):
            self.model = wrap(model, setting.strategy, mesh)
        for parameter in self.model.parameters():
            label(parameter, "parameters")
        self.optimizer = make_optimizer(network, self.model, setting.strategy)

    def warm_up(self) -> None:
        for _ in range(WARM_UP_STEPS):
            self.peaks_of_step(SMALLEST_BATCH)

    def peaks_of_step(self, samples: int) -> Peaks:
        """Take a step of so many samples on each device, and return its peaks."""
        self.tracker.reset_peaks()
        if self.setting.strategy == DATA_PARALLEL:
            samples *= self.setting.devices  # one process has the inputs of all devices, and cuts them
        # The loop of a training holds the batch until the next one: it lies on the device during backward too.
        batch = self.network.make_batch(samples)
        self.network.take_step(self.model, self.optimizer, batch)
        return list(self.tracker.peaks().values())


def wrap(model: nn.Module, strategy: str, mesh: DeviceMesh) -> nn.Module:
    """The model as the strategy trains it on the devices of `mesh`."""
    if strategy == DATA_PARALLEL:
        return EmulatedDataParallel(model, mesh.size())
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


def _skip_all_reduce(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A hook of DDP in place of the all-reduce: the fake group's has no result, and DDP asks for one."""
    label(bucket.buffer(), "communication")
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
