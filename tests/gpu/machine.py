"""A rank on a machine with GPUs, imitated on one that has none.

    with imitated_rank(rank=3, world_size=8) as machine:
        module.train(args)
    machine.watch.waits

    real                                          imitated
    --------------------------------------------  ----------------------------------------------------------------
    the level, the core, the Trainer              tensors: FakeTensors, which have a device and a shape, no values
    torch's modules, optimizers, data loaders     torch.cuda: the methods of `Cuda` here
    DDP's Python                                  DDP's C++: only sends rank 0's weights
    the collectives of tensors, up to c10d        the process group: torch's "fake" one, in which this rank is alone
    the order of all operations                   backward: gives every parameter that made the loss a gradient
                                                  DataParallel's forward: calls the module, on one GPU

A rank that touches a GPU of another one raises Misplaced. What this cannot see is in the README.
"""

import contextlib
import inspect
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

from common.accelerator import state
from common.nested import leaves
from tests.gpu.watch import Misplaced, Watch
from tests.states import forget_states

GPUS = 8


class Cuda:
    """Stand-ins for torch.cuda's functions: each method for the function of its name.

    Attributes:
        own_gpus: the indices of the GPUs that this process is to use.
        calls: for each function that concerns one GPU the indices with which it was called, in order.
        answers: what else is there under its name in torch.cuda, always the same.
    """

    def __init__(self, gpus: int, own_gpus: range, watch: Watch) -> None:
        self.own_gpus = own_gpus
        self.calls: defaultdict[str, list[int]] = defaultdict(list)
        self.answers = {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "is_bf16_supported": lambda including_emulation=True: True,
            "device_count": lambda: gpus,
            "get_device_capability": lambda device=None: (9, 0),
            "get_device_properties": lambda device=None: SimpleNamespace(total_memory=2**36, multi_processor_count=100),
            "default_generators": [SimpleNamespace(manual_seed=lambda seed: None)] * gpus,
        }
        self._watch = watch
        self._current = 0

    def _note(self, function: str, device: Any) -> int:
        """The index of `device`, which must be one of this process's own; None is the current one."""
        index = self._current
        if isinstance(device, int):
            index = device
        elif device is not None and torch.device(device).index is not None:
            index = torch.device(device).index
        if index not in self.own_gpus:
            raise Misplaced(f"{function} of cuda:{index} by a rank on cuda:{self.own_gpus[0]}")
        self.calls[function].append(index)
        return index

    def set_device(self, device: Any) -> None:
        self._current = self._note("set_device", device)

    def current_device(self) -> int:
        return self._current

    def current_stream(self, device: Any = None) -> Any:
        return SimpleNamespace(record_event=self._watch.record_event, is_capturing=lambda: False)

    def synchronize(self, device: Any = None) -> None:
        self._note("synchronize", device)
        self._watch.note_all_arrived()
        self._watch.note_wait("synchronize")

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self._note("reset_peak_memory_stats", device)

    def max_memory_allocated(self, device: Any = None) -> int:
        return peak_of(self._note("max_memory_allocated", device))

    def get_rng_state(self, device: Any = None) -> Tensor:
        self._note("get_rng_state", device)
        return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        self._note("set_rng_state", device)


def public_methods(stand_in: Any) -> list[tuple[str, Callable]]:
    return [(name, value) for name, value in inspect.getmembers(stand_in, inspect.ismethod) if name[0] != "_"]


def peak_of(index: int) -> int:
    """The peak of a GPU's memory in bytes: each has another one."""
    return 2**20 * (index + 1)


class ProcessGroup:
    """Stand-ins for torch.distributed's functions: each method for the function of its name.

    Collectives of tensors are torch's own, on its "fake" backend. Those of objects would need values of tensors.

    Attributes:
        backend: for which `init_process_group` was asked.
        endings: how the rank has left its groups: "destroyed" waits for the others, "aborted" does not.
    """

    def __init__(self, rank: int, world_size: int, cuda: Cuda, watch: Watch) -> None:
        self.backend: str | None = None
        self.endings: list[str] = []
        self._rank = rank
        self._world_size = world_size
        self._cuda = cuda
        self._watch = watch
        self._init = dist.init_process_group
        self._destroy = dist.destroy_process_group

    def init_process_group(self, backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        if backend == "nccl" and not self._cuda.calls["set_device"]:
            raise Misplaced("a group of nccl before set_device: every rank would use cuda:0")
        self.backend = backend
        self._init("fake", store=FakeStore(), rank=self._rank, world_size=self._world_size)

    def rendezvous(self, *args: Any, **kwargs: Any) -> Iterator[tuple]:
        return iter([(FakeStore(), self._rank, self._world_size)])

    def get_backend(self, group: Any = None) -> str | None:
        return self.backend

    def all_gather_object(self, values: list, value: Any, group: Any = None) -> None:
        check_pickle(value)
        values[:] = [value] * len(values)

    def broadcast_object_list(self, values: list, *args: Any, **kwargs: Any) -> None:
        check_pickle(values)

    def barrier(self, *args: Any, device_ids: list[int] | None = None, **kwargs: Any) -> None:
        if self.backend == "nccl" and device_ids != list(self._cuda.own_gpus):
            raise Misplaced(f"barrier with device_ids {device_ids}: nccl would guess a GPU")
        self._watch.note_wait("barrier")

    def destroy_process_group(self, group: Any = None) -> None:
        self.endings.append("destroyed")
        self._destroy(group)

    def _abort_process_group(self, group: Any = None) -> None:
        self.endings.append("aborted")
        self._destroy(group)


def check_pickle(value: Any) -> None:
    """Raise Misplaced if a tensor in `value` would come out of its pickle on the GPU of the sender's number."""
    for leaf in leaves(value):
        if isinstance(leaf, Tensor) and leaf.is_cuda:
            raise Misplaced("a tensor of a GPU is pickled: it comes back on the sender's GPU")


def meet(store: Any, rank: int, world_size: int, timeout: Any, backend: str) -> str:
    """In place of comparing the backend with the other ranks."""
    return ""


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


def broadcast_coalesced(group: Any, tensors: list[Tensor], buffer_size: int, source: int, *args: Any) -> None:
    """In place of the C++ by which DDP sends rank 0's weights to all."""
    for tensor in tensors:
        dist.broadcast(tensor, source)


@dataclass
class Machine:
    """What a rank asked of its GPUs and of the other ranks, its operations, and what its training returned."""

    watch: Watch
    cuda: Cuda
    group: ProcessGroup
    result: dict[str, Any] = field(default_factory=dict)

    def replacements(self) -> Iterator[tuple[Any, str, Any]]:
        """What is another one on this machine: its owner, its name, and what stands in its place."""
        # The GPUs.
        for name, function in (*public_methods(self.cuda), *self.cuda.answers.items()):
            yield torch.cuda, name, function
            if hasattr(torch.accelerator, name):  # which asks whatever GPU there is
                yield torch.accelerator, name, function
        yield torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda")
        # The process group, and the meeting before it.
        for name, function in public_methods(self.group):
            yield dist, name, function
        yield dist.distributed_c10d, "_abort_process_group", self.group._abort_process_group
        yield state, "meet", meet
        # DataParallel, and DDP's C++.
        yield nn.DataParallel, "forward", lambda wrapper, *inputs: wrapper.module(*inputs)
        for name in ("Reducer", "Logger", "_verify_params_across_processes"):
            yield dist, name, mock.MagicMock()
        yield dist, "_broadcast_coalesced", broadcast_coalesced
        # What a FakeTensor cannot do, or would do without being seen.
        yield Tensor, "backward", give_gradients
        yield Tensor, "pin_memory", lambda tensor, *args: self.watch.pinned_copy(tensor)
        yield Tensor, "numpy", lambda tensor: self.watch.as_array(tensor)
        # A network that moves to a GPU keeps its Parameters, which the optimizer knows. torch swaps the contents of
        # FakeTensors only if nobody refers to them weakly, as the fake mode's own memory does.
        yield torch.__future__, "_swap_module_params_on_conversion", True
        yield torch.utils, "weakref", SimpleNamespace(getweakrefs=lambda tensor: [])
        # It then asks no driver, although `torch.cuda.is_available` says that there is one.
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
    cuda = Cuda(gpus, own_gpus, watch)
    machine = Machine(watch, cuda, ProcessGroup(rank, world_size, cuda, watch))
    forget_states()
    with contextlib.ExitStack() as stack:
        stack.callback(forget_states)
        stack.enter_context(mock.patch.dict(os.environ, environment))
        for owner, name, new in machine.replacements():
            if not hasattr(owner, name):
                pytest.skip(f"torch {torch.__version__} has no {owner.__name__}.{name}")
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
