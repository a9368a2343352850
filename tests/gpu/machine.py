"""A rank on a machine with GPUs, imitated on one that has none.

    with imitated_rank(rank=3, world_size=8) as machine:
        module.train(args)
    machine.watch.waits

Real are the level, the core and the Trainer; torch's modules, optimizers and data loaders; the collectives of tensors,
up to the call of the library; and the order of all operations. The rest is imitated:

    imitated                     because                            by
    ---------------------------  ---------------------------------  ---------------------------------------------------
    tensors                      no GPU has memory for them         FakeTensors: device, dtype and shape, and no values
    values read from a GPU       FakeTensors have none              one for each file that reads: `VALUES_ON_GPU`
    values read from the CPU     the same, but a sampler's order    always 1: `VALUE_ON_CPU`
    torch.cuda                   it asks the driver                 `imitate_cuda`: a call for another rank's GPU raises
    the process group            it waits for the other ranks       `imitate_process_group`: all ranks send our objects
    backward, DataParallel, DDP  their C++ needs driver and values  `imitate_operations`: empty gradients, bare modules

FSDP and meshes are not imitated, because they need more of torch.cuda: the tests train them on the CPU only. The README
says what else this cannot see.
"""

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.torch_version import TorchVersion

from common.accelerator.state import PartialState
from tests.gpu.watch import ARRIVED, Misplaced, Watch
from tests.states import forget_states

GPUS = 8
_init_process_group = dist.init_process_group  # The real one. `Machine` stands in its place, and calls it.


class Machine:
    """The answers to what a rank asks of torch.cuda and of the process group, and a note of each question.

    Args:
        rank, world_size: of the process group.
        own_gpus: the indices of the GPUs that this process is to use.

    Attributes:
        watch: sees each operation.
        calls: for each function that concerns one GPU the indices with which it was called, in order.
        backend: the one for which `init_process_group` was asked.
        current: the index of the GPU that `set_device` has chosen.
    """

    def __init__(self, rank: int, world_size: int, own_gpus: range) -> None:
        self.rank = rank
        self.world_size = world_size
        self.own_gpus = own_gpus
        self.watch = Watch(own_gpus)
        self.calls: defaultdict[str, list[int]] = defaultdict(list)
        self.backend: str | None = None
        self.current = 0

    def note_call(self, function: str, device: Any) -> int:
        """Note a call of a function of torch.cuda. Returns the index of its GPU: for None that of the current one.

        Raises:
            Misplaced: if it is the GPU of another process.
        """
        index = device if isinstance(device, int) else torch.device(device or "cuda").index
        if index is None:
            index = self.current
        if index not in self.own_gpus:
            raise Misplaced(f"{function} of cuda:{index} by a rank on cuda:{self.own_gpus[0]}")
        self.calls[function].append(index)
        return index

    def set_device(self, device: Any) -> None:
        self.current = self.note_call("set_device", device)

    def synchronize(self, device: Any = None) -> None:
        self.note_call("synchronize", device)
        self.watch.note_wait("synchronize")

    def current_stream(self, device: Any = None) -> mock.Mock:
        """A stream whose events can be waited for."""
        stream = mock.Mock()
        stream.record_event().synchronize = lambda: self.watch.note_wait(ARRIVED)
        return stream

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self.note_call("reset_peak_memory_stats", device)

    def max_memory_allocated(self, device: Any = None) -> int:
        return peak_of(self.note_call("max_memory_allocated", device))

    def get_rng_state(self, device: Any = None) -> Tensor:
        self.note_call("get_rng_state", device)
        return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        self.note_call("set_rng_state", device)

    def init_process_group(self, backend: str, *args: Any, **kwargs: Any) -> None:
        if backend == "nccl" and not self.calls["set_device"]:
            raise Misplaced("a group of nccl before set_device: every rank would use cuda:0")
        self.backend = backend
        _init_process_group("fake", store=FakeStore(), rank=self.rank, world_size=self.world_size)

    def barrier(self, *args: Any, device_ids: list[int] | None = None, **kwargs: Any) -> None:
        if self.backend == "nccl" and device_ids != list(self.own_gpus):
            raise Misplaced(f"barrier with device_ids {device_ids}: nccl would guess a GPU")
        self.watch.note_wait("barrier")


def peak_of(index: int) -> int:
    """The peak of a GPU's memory in bytes, a different one for each GPU."""
    return 2**20 * (index + 1)


@contextlib.contextmanager
def imitate_cuda(machine: Machine) -> Iterator[None]:
    """In place of torch.cuda, which would ask the driver."""
    properties = SimpleNamespace(major=9, minor=0, total_memory=2**36, multi_processor_count=100)
    answers = {
        "is_available": lambda: True,
        "device_count": lambda: GPUS,
        "get_device_properties": lambda device=None: properties,  # DataParallel looks for unequal GPUs.
        "default_generators": [mock.Mock()] * GPUS,  # The replicas of DataParallel draw dropout from them.
        "current_device": lambda: machine.current,
        "current_stream": machine.current_stream,  # An evaluation waits for the end of a copy to the CPU.
        "set_device": machine.set_device,
        "reset_peak_memory_stats": machine.reset_peak_memory_stats,
        "max_memory_allocated": machine.max_memory_allocated,
        "get_rng_state": machine.get_rng_state,
        "set_rng_state": machine.set_rng_state,
    }
    with (
        mock.patch.multiple(torch.cuda, **answers),
        mock.patch.object(torch.accelerator, "synchronize", machine.synchronize),
    ):
        yield


@contextlib.contextmanager
def imitate_process_group(machine: Machine) -> Iterator[None]:
    """In place of nccl, which would wait for the other ranks."""
    functions = {
        "init_process_group": machine.init_process_group,
        "get_backend": lambda group=None: machine.backend,  # It is "fake", and a level looks for nccl.
        "barrier": machine.barrier,
        "all_gather_object": gather_own_object,  # Bytes without values cannot be unpickled.
    }
    with (
        mock.patch.multiple(dist, **functions),
        # The core meets the other ranks in a store before it makes the group.
        mock.patch.object(PartialState, "_join", lambda state, backend, *args: machine.init_process_group(backend)),
    ):
        yield


def gather_own_object(values: list, value: Any, group: Any = None) -> None:
    values[:] = [value] * len(values)


@contextlib.contextmanager
def imitate_operations(machine: Machine) -> Iterator[None]:
    """In place of what torch does in C++, where a FakeTensor has no memory to read and the driver is asked."""
    methods = {
        "backward": give_gradients,
        "pin_memory": lambda tensor, *args: machine.watch.pinned_copy(tensor),
        "numpy": lambda tensor: numpy.zeros(tensor.shape),
    }
    with (
        mock.patch.multiple(Tensor, **methods),
        mock.patch.object(nn.DataParallel, "forward", call_module),
        mock.patch.multiple(DistributedDataParallel, __init__=init_ddp, forward=call_module),
        # A network that moves to a GPU keeps its Parameters, which the optimizer knows: torch swaps their contents. It
        # refuses to where somebody refers to a Parameter weakly, as the fake mode's own memory does.
        mock.patch.object(torch.utils, "weakref", SimpleNamespace(getweakrefs=lambda tensor: [])),
        # The fake mode then asks no driver, although `torch.cuda.is_available` says that there is one.
        mock.patch.object(FakeTensorMode, "avoid_device_init", True),
    ):
        yield


def give_gradients(loss: Tensor, *args: Any, **kwargs: Any) -> None:
    """In place of backward, whose engine asks the driver: every parameter that made `loss` gets a gradient."""
    seen = set()
    nodes = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
        parameter = getattr(node, "variable", None)
        if parameter is not None:
            gradient = torch.empty_like(parameter)
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def init_ddp(ddp: nn.Module, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """In place of DDP's constructor, whose C++ would read the values of the weights."""
    nn.Module.__init__(ddp)
    ddp.module = module
    ddp.require_backward_grad_sync = True


def call_module(wrapper: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return wrapper.module(*args, **kwargs)


IMITATING = pytest.mark.skipif(
    torch.__version__ < TorchVersion("2.15"), reason="an older torch asks the driver even for a FakeTensor"
)


@contextlib.contextmanager
def imitated_rank(rank: int = 0, world_size: int = 1, nodes: int = 1) -> Iterator[Machine]:
    """This process as rank `rank` of `world_size` on nodes of eight GPUs each, as torchrun would start it.

    A single process is started without torchrun, and all GPUs are its own.
    """
    environment = {}
    own_gpus = range(GPUS)
    if world_size > 1:
        local_world_size = world_size // nodes
        local_rank = rank % local_world_size
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(local_world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "1",
        }
        own_gpus = range(local_rank, local_rank + 1)
    machine = Machine(rank, world_size, own_gpus)
    forget_states()
    counting = register_optimizer_step_post_hook(machine.watch.count_step)
    try:
        with (
            mock.patch.dict(os.environ, environment),
            imitate_cuda(machine),
            imitate_process_group(machine),
            imitate_operations(machine),
            FakeTensorMode(allow_non_fake_inputs=True),
            machine.watch,
        ):
            yield machine
    finally:
        counting.remove()
        forget_states()
