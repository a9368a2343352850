"""A rank on a machine with GPUs, imitated: its tensors have a device and a shape, and no values.

    with imitated_rank(rank=3, world_size=8) as machine:
        module.train(args)
    machine.waits_within_steps()

Within the block torch takes the machine for one with GPUs. Tensors are torch's FakeTensors, so an operation on two
devices raises; the process group is torch's "fake" one, in which this rank is alone. What torch is asked about GPUs and
about the group is answered by a `Machine`, which raises Misplaced where it is the wrong GPU. What this cannot see is in
the README.
"""

import contextlib
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.optim.optimizer as torch_optimizer
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from common.accelerator import state
from common.nested import leaves
from tests.gpu.watch import Event, Misplaced, Wait, Watch
from tests.states import forget_states

GPUS = 8
_init_process_group = dist.init_process_group
_destroy_process_group = dist.destroy_process_group


class Machine:
    """What this rank has asked of CUDA and of the process group, and the answers of both.

    Attributes:
        own: the index of the rank's GPU.
        named: the GPU that `set_device` named last; None before that.
        backend: what the rank asked `init_process_group` for.
        endings: how the rank has left its process groups: "destroyed" waits for the others, "aborted" does not.
        result: of the training.
        random_states: of which GPUs' generators the state was "read" or "written".
        peaks: of which GPUs the peak of the memory was reset or read, a pair of the question and the index.
    """

    def __init__(self, rank: int, world_size: int, gpus: int, nodes: int, integers: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.gpus = gpus
        self.local_world_size = world_size // nodes
        self.local_rank = rank % self.local_world_size
        self.own = self.local_rank % gpus
        self.named: int | None = None
        self.backend: str | None = None
        self.peaks: list[tuple[str, int]] = []
        self.random_states: list[tuple[str, int]] = []
        self.endings: list[str] = []
        self.result: dict[str, Any] = {}
        self.watch = Watch(self.check_collective, integers)

    def environment(self) -> dict[str, str]:
        """What torchrun would set."""
        if self.world_size == 1:
            return {}
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "1",
        }

    def waits_within_steps(self) -> list[Wait]:
        """The Waits after the first optimizer step and before the last one."""
        return [wait for wait in self.watch.waits if 1 <= wait.step < self.watch.steps]

    def index(self, device: Any = None) -> int:
        """The number of a GPU as torch reads it: without one it is the GPU that `set_device` named last, else 0."""
        if isinstance(device, int):
            return device
        number = None if device is None else torch.device(device).index
        return (self.named or 0) if number is None else number

    def set_device(self, device: Any) -> None:
        self.named = self.index(device)
        if self.named >= self.gpus:
            raise Misplaced(f"set_device(cuda:{self.named}) on a machine of {self.gpus} GPUs")

    def check_collective(self, name: str, tensors: list[Tensor]) -> None:
        """Raise Misplaced unless all tensors that nccl is given are on the GPU that `set_device` named last."""
        if self.backend != "nccl":
            return
        if self.named is None:
            raise Misplaced(f"{name} before set_device: every rank would use cuda:0")
        for tensor in tensors:
            if tensor.device != torch.device("cuda", self.named):
                raise Misplaced(f"{name} of a tensor on {tensor.device} after set_device(cuda:{self.named})")

    def ask_for_peak(self, question: str, device: Any = None) -> int:
        index = self.index(device)
        if self.world_size > 1 and index != self.own:
            raise Misplaced(f"rank {self.rank}, on cuda:{self.own}, calls {question} of cuda:{index}")
        self.peaks.append((question, index))
        return self.peak_of(index)

    @staticmethod
    def peak_of(index: int) -> int:
        """The peak of a GPU's memory in bytes: each has another one."""
        return 2**20 * (index + 1)

    def get_rng_state(self, device: Any = None) -> Tensor:
        self.random_states.append(("read", self.index(device)))
        return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        self.random_states.append(("written", self.index(device)))

    # The process group.

    def init_process_group(self, backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        self.backend = backend
        _init_process_group("fake", store=FakeStore(), rank=self.rank, world_size=self.world_size)

    @staticmethod
    def meet(store: Any, rank: int, world_size: int, timeout: Any, backend: str) -> str:
        """In place of meeting the other ranks."""
        return ""

    def get_backend(self, group: Any = None) -> str | None:
        return self.backend

    def all_gather_object(self, values: list, value: Any, group: Any = None) -> None:
        self.check_collective("all_gather_object", [])
        self.check_pickle(value)
        values[:] = [value] * len(values)

    def broadcast_object_list(self, values: list, *args: Any, **kwargs: Any) -> None:
        self.check_collective("broadcast_object_list", [])
        self.check_pickle(values)

    def check_pickle(self, value: Any) -> None:
        """Raise Misplaced if a tensor in `value` would come out of its pickle on the GPU of the sender's number."""
        for leaf in leaves(value):
            if isinstance(leaf, Tensor) and leaf.device.type == "cuda":
                raise Misplaced("a tensor of a GPU is pickled: it comes back on the sender's GPU")

    def destroy_process_group(self, group: Any = None) -> None:
        self.endings.append("destroyed")
        _destroy_process_group(group)

    def abort_process_group(self, group: Any = None) -> None:
        self.endings.append("aborted")
        _destroy_process_group(group)

    def barrier(self, *args: Any, device_ids: list[int] | None = None, **kwargs: Any) -> None:
        self.check_collective("barrier", [])
        if self.backend == "nccl" and device_ids != [self.own]:
            raise Misplaced(f"barrier with device_ids {device_ids} on cuda:{self.own}: nccl would guess a GPU")
        self.watch.note_wait("barrier")

    # What a program asks of tensors and of CUDA.

    def count_step(self, *_: Any) -> None:
        self.watch.steps += 1

    def as_array(self, tensor: Tensor) -> numpy.ndarray:
        self.watch.check_arrived(tensor)
        return numpy.zeros(tensor.shape, str(tensor.dtype).removeprefix("torch."))

    def functions(self) -> dict[str, Any]:
        """The functions of torch.cuda that answer from here."""

        def synchronize(device: Any = None) -> None:
            if self.index(device) != self.own:
                raise Misplaced(f"rank {self.rank}, on cuda:{self.own}, waits for cuda:{self.index(device)}")
            self.watch.arrived(len(self.watch.operations))
            self.watch.note_wait("synchronize")

        stream = SimpleNamespace(
            record_event=lambda: Event(self.watch), is_capturing=lambda: False, synchronize=synchronize
        )
        return {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: self.gpus,
            "current_device": self.index,
            "set_device": self.set_device,
            "current_stream": lambda device=None: stream,
            "is_current_stream_capturing": lambda: False,
            "synchronize": synchronize,
            "reset_peak_memory_stats": lambda device=None: self.ask_for_peak("reset_peak_memory_stats", device),
            "max_memory_allocated": lambda device=None: self.ask_for_peak("max_memory_allocated", device),
            "get_rng_state": self.get_rng_state,
            "set_rng_state": self.set_rng_state,
            "get_device_capability": lambda device=None: (9, 0),
            "is_bf16_supported": lambda including_emulation=True: True,
            "empty_cache": lambda: None,
            "default_generators": (SimpleNamespace(manual_seed=lambda seed: None),) * self.gpus,
            "manual_seed": lambda seed: None,
            "manual_seed_all": lambda seed: None,
            "_lazy_init": lambda: None,
            "_lazy_call": lambda callable, **kwargs: None,
        }


def give_gradients(loss: Tensor, *args: Any, **kwargs: Any) -> None:
    """In place of backward, which does not run on imitated GPUs: every parameter that made `loss` gets a gradient."""
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


# What DataParallel and DDP do in Python here: they hold the network, and DDP sends rank 0's weights to all.


def wrap_for_data_parallel(wrapper: nn.Module, module: nn.Module, device_ids: list[torch.device]) -> None:
    nn.Module.__init__(wrapper)
    wrapper.module = module
    wrapper.device_ids = [device.index for device in device_ids]


def wrap_for_ddp(wrapper: nn.Module, module: nn.Module, device_ids: list[int] | None = None, **options: Any) -> None:
    nn.Module.__init__(wrapper)
    wrapper.module = module
    if device_ids not in (None, [torch.cuda.current_device()]):
        raise Misplaced(f"DDP on {device_ids} after set_device({torch.cuda.current_device()})")
    for parameter in module.parameters():
        dist.broadcast(parameter.detach(), 0)


def forward_of_wrapped(wrapper: nn.Module, *inputs: Any, **kwargs: Any) -> Any:
    return wrapper.module(*inputs, **kwargs)


@contextlib.contextmanager
def imitated_rank(
    rank: int = 0, world_size: int = 1, gpus: int = GPUS, nodes: int = 1, integers: int = 1
) -> Iterator[Machine]:
    """This process as rank `rank` of `world_size` on nodes of `gpus` GPUs each, as torchrun would start it.

    A single process is started without torchrun. Every integer that is read from a tensor is `integers`.
    """
    if not hasattr(torch_optimizer, "_foreach_supported_types"):
        pytest.skip(f"torch {torch.__version__} has no list of tensors for foreach")
    machine = Machine(rank, world_size, gpus, nodes, integers)
    forget_states()
    with contextlib.ExitStack() as stack:
        stack.callback(forget_states)
        stack.enter_context(mock.patch.dict(os.environ, machine.environment()))
        for owner, name, new in _replacements(machine):
            if hasattr(owner, name):  # else this torch does without it
                stack.enter_context(mock.patch.object(owner, name, new))
        swapped = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, swapped)
        hook = torch_optimizer.register_optimizer_step_post_hook(machine.count_step)
        stack.callback(hook.remove)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        try:
            torch.empty(1).to("cuda")
        except RuntimeError as error:  # torch 2.11 asks the driver, even for a FakeTensor
            pytest.skip(f"torch {torch.__version__} has no FakeTensors of a GPU where there is none: {error}")
        stack.enter_context(machine.watch)
        yield machine


def _replacements(machine: Machine) -> Iterator[tuple[Any, str, Any]]:
    """What is another one on the imitated machine: its owner, its name, and what stands in its place."""
    answers = machine.functions()
    for name, answer in answers.items():
        yield torch.cuda, name, answer
    for name in ("current_stream", "synchronize", "is_available"):
        yield torch.accelerator, name, answers[name]
    yield torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda")
    for name in ("init_process_group", "get_backend", "all_gather_object", "broadcast_object_list", "barrier"):
        yield dist, name, getattr(machine, name)
    yield dist, "destroy_process_group", machine.destroy_process_group
    yield dist.distributed_c10d, "_abort_process_group", machine.abort_process_group
    yield dist, "rendezvous", lambda *args, **kwargs: iter([(FakeStore(), machine.rank, machine.world_size)])
    yield state, "meet", machine.meet
    yield nn.DataParallel, "__init__", wrap_for_data_parallel
    yield nn.DataParallel, "forward", forward_of_wrapped
    yield DistributedDataParallel, "__init__", wrap_for_ddp
    yield DistributedDataParallel, "forward", forward_of_wrapped
    yield DistributedDataParallel, "no_sync", lambda model: contextlib.nullcontext()
    yield Tensor, "backward", give_gradients
    yield Tensor, "pin_memory", lambda tensor, *args: machine.watch.pin(tensor.clone())
    yield Tensor, "numpy", lambda tensor, **kwargs: machine.as_array(tensor)
    # A network that moves to a GPU keeps its Parameters, which the optimizer knows. torch swaps the contents of
    # FakeTensors only if nobody refers to them weakly, as the fake mode's own memory does.
    yield torch.utils, "weakref", SimpleNamespace(getweakrefs=lambda tensor: [])
    # By default foreach is for tensors and parameters themselves, not for subclasses.
    yield torch_optimizer, "_foreach_supported_types", [*torch_optimizer._foreach_supported_types, FakeTensor]
    # It then asks no driver, although `torch.cuda.is_available` says that there is one.
    yield FakeTensorMode, "avoid_device_init", True
