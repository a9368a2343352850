"""A rank on a machine with GPUs, imitated on one that has none.

    with imitated_rank(rank=3, world_size=8) as machine:
        module.train(args)
    machine.watch.waits

    real                                          imitated
    --------------------------------------------  ----------------------------------------------------------------
    the level, the core, the Trainer              tensors: FakeTensors, which have a device and a shape, no values
    torch's modules, optimizers, data loaders     torch.cuda: `Gpus` here
    the collectives of tensors, up to c10d        the process group: torch's "fake" one, in which this rank is alone
    the order of all operations                   collectives of objects: each rank has what this one sends
                                                  backward: gives every parameter that made the loss a gradient
                                                  DataParallel and DDP: call the module

A rank that touches a GPU of another one raises Misplaced. What this cannot see is in the README.
"""

import contextlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.testing._internal.distributed.fake_pg import FakeStore

from common.accelerator.state import PartialState
from common.nested import leaves
from tests.gpu.watch import Misplaced, Watch
from tests.states import forget_states

GPUS = 8


class Gpus:
    """The GPUs of the machine, as `torch.cuda` shows them to this process.

    Attributes:
        own: the indices of those that this process is to use.
        calls: for each function that concerns one GPU the indices with which it was called, in order.
    """

    def __init__(self, count: int, own: range, watch: Watch) -> None:
        self.own = own
        self.calls: defaultdict[str, list[int]] = defaultdict(list)
        self._count = count
        self._watch = watch
        self._current = 0

    def functions(self) -> dict[str, Any]:
        """What stands in torch.cuda under each name."""
        stream = SimpleNamespace(record_event=self._watch.record_event, is_capturing=lambda: False)
        return {
            # What is the same on every GPU.
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "is_bf16_supported": lambda including_emulation=True: True,
            "device_count": lambda: self._count,
            "get_device_capability": lambda device=None: (9, 0),
            "get_device_properties": lambda device=None: SimpleNamespace(total_memory=2**36, multi_processor_count=100),
            "default_generators": [SimpleNamespace(manual_seed=lambda seed: None)] * self._count,
            "current_device": lambda: self._current,
            "current_stream": lambda device=None: stream,
            # What concerns one GPU.
            "set_device": self._set_device,
            "synchronize": self._synchronize,
            "reset_peak_memory_stats": lambda device=None: self._note("reset_peak_memory_stats", device),
            "max_memory_allocated": lambda device=None: peak_of(self._note("max_memory_allocated", device)),
            "get_rng_state": self._get_rng_state,
            "set_rng_state": lambda state, device=None: self._note("set_rng_state", device),
        }

    def _note(self, function: str, device: Any) -> int:
        """The index of `device`, which must be one of this process's own; None is the current one."""
        index = self._current
        if isinstance(device, int):
            index = device
        elif device is not None and torch.device(device).index is not None:
            index = torch.device(device).index
        if index not in self.own:
            raise Misplaced(f"{function} of cuda:{index} by a rank on cuda:{self.own[0]}")
        self.calls[function].append(index)
        return index

    def _set_device(self, device: Any) -> None:
        self._current = self._note("set_device", device)

    def _synchronize(self, device: Any = None) -> None:
        self._note("synchronize", device)
        self._watch.note_all_arrived()
        self._watch.note_wait("synchronize")

    def _get_rng_state(self, device: Any = None) -> Tensor:
        self._note("get_rng_state", device)
        return torch.zeros(16, dtype=torch.uint8)


def peak_of(index: int) -> int:
    """The peak of a GPU's memory in bytes: each has another one."""
    return 2**20 * (index + 1)


class ProcessGroup:
    """The process group of a rank that is alone, as `torch.distributed` shows it.

    Attributes:
        backend: for which `init_process_group` was asked.
    """

    def __init__(self, rank: int, world_size: int, gpus: Gpus, watch: Watch) -> None:
        self.backend: str | None = None
        self._rank = rank
        self._world_size = world_size
        self._gpus = gpus
        self._watch = watch
        self._init_process_group = dist.init_process_group

    def functions(self) -> dict[str, Callable]:
        """What stands in torch.distributed under each name. The collectives of tensors are torch's own."""
        return {
            "init_process_group": self.init,
            "get_backend": lambda group=None: self.backend,
            "barrier": self._barrier,
            "all_gather_object": self._all_gather_object,
            "broadcast_object_list": lambda values, *args, **kwargs: check_pickle(values),
        }

    def init(self, backend: str, *args: Any, **kwargs: Any) -> None:
        if backend == "nccl" and not self._gpus.calls["set_device"]:
            raise Misplaced("a group of nccl before set_device: every rank would use cuda:0")
        self.backend = backend
        self._init_process_group("fake", store=FakeStore(), rank=self._rank, world_size=self._world_size)

    def _barrier(self, *args: Any, device_ids: list[int] | None = None, **kwargs: Any) -> None:
        if self.backend == "nccl" and device_ids != list(self._gpus.own):
            raise Misplaced(f"barrier with device_ids {device_ids}: nccl would guess a GPU")
        self._watch.note_wait("barrier")

    def _all_gather_object(self, values: list, value: Any, group: Any = None) -> None:
        check_pickle(value)
        values[:] = [value] * len(values)


def check_pickle(value: Any) -> None:
    """Raise Misplaced if a tensor in `value` would come out of its pickle on the GPU of the sender's number."""
    for leaf in leaves(value):
        if isinstance(leaf, Tensor) and leaf.is_cuda:
            raise Misplaced("a tensor of a GPU is pickled: it comes back on the sender's GPU")


def wrap(ddp: nn.Module, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """In place of DDP's constructor, whose C++ would read the values of the weights."""
    nn.Module.__init__(ddp)
    ddp.module = module
    ddp.require_backward_grad_sync = True


def call_module(wrapper: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return wrapper.module(*args, **kwargs)


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


@dataclass
class Machine:
    """What a rank asked of its GPUs and of the other ranks, its operations, and what its training returned."""

    watch: Watch
    gpus: Gpus
    group: ProcessGroup
    result: dict[str, Any] = field(default_factory=dict)

    def replacements(self) -> Iterator[tuple[Any, str, Any]]:
        """What is another one on this machine: its owner, its name, and what stands in its place."""
        for name, function in self.gpus.functions().items():
            yield torch.cuda, name, function
            if hasattr(torch.accelerator, name):  # which asks whatever GPU there is
                yield torch.accelerator, name, function
        yield torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda")
        for name, function in self.group.functions().items():
            yield dist, name, function
        yield PartialState, "_join", lambda state, backend, *args: self.group.init(backend)
        yield nn.DataParallel, "forward", call_module
        yield nn.parallel.DistributedDataParallel, "__init__", wrap
        yield nn.parallel.DistributedDataParallel, "forward", call_module
        # What a FakeTensor cannot do, or would do without being seen.
        yield Tensor, "backward", give_gradients
        yield Tensor, "pin_memory", lambda tensor, *args: self.watch.pinned_copy(tensor)
        yield Tensor, "numpy", lambda tensor: self.watch.as_array(tensor)
        # A network that moves to a GPU keeps its Parameters, which the optimizer knows. torch swaps the contents of
        # FakeTensors only if nobody refers to them weakly, as the fake mode's own memory does.
        yield torch.__future__, "_swap_module_params_on_conversion", True
        yield torch.utils, "weakref", SimpleNamespace(getweakrefs=lambda tensor: [])
        # The fake mode then asks no driver, although `torch.cuda.is_available` says that there is one.
        yield FakeTensorMode, "avoid_device_init", True


@contextlib.contextmanager
def imitated_rank(rank: int = 0, world_size: int = 1, gpus: int = GPUS, nodes: int = 1) -> Iterator[Machine]:
    """This process as rank `rank` of `world_size` on nodes of `gpus` GPUs each, as torchrun would start it.

    A single process is started without torchrun, and all GPUs are its own.
    """
    environment = {}
    own_gpus = range(gpus)
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
        own_gpus = range(local_rank % gpus, local_rank % gpus + 1)
    watch = Watch(own_gpus)
    on_machine = Gpus(gpus, own_gpus, watch)
    machine = Machine(watch, on_machine, ProcessGroup(rank, world_size, on_machine, watch))
    forget_states()
    with contextlib.ExitStack() as stack:
        stack.callback(forget_states)
        stack.enter_context(mock.patch.dict(os.environ, environment))
        for owner, name, new in machine.replacements():
            stack.enter_context(mock.patch.object(owner, name, new))
        hook = register_optimizer_step_post_hook(watch.count_step)
        stack.callback(hook.remove)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        try:
            torch.empty(1).to("cuda")
        except RuntimeError as error:  # torch 2.11 asks the driver, even for a FakeTensor
            pytest.skip(f"torch {torch.__version__} has no FakeTensors of a GPU where there is none: {error}")
        stack.enter_context(watch)
        yield machine
