"""A process as one of eight ranks, each with a GPU, imitated on a machine that has none.

    with imitated_rank() as machine:
        module.train(args)
    machine.waits

Real are the level, the core and the Trainer; torch's modules, backward, optimizers and data loaders; all values; and
the order of all operations. Tensors on a GPU are those of `labels.py`, which are on the CPU and say that they are not.
Three functions below have stand-ins for all else: what takes the name of a GPU raises if that is another rank's, all
ranks send what this one sends, and DataParallel and DDP call the bare module.

FSDP and meshes are not imitated, because they need more of torch.cuda: the tests train them on the CPU only. The README
says what else this cannot see.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from common.accelerator.state import PartialState
from tests.gpu.labels import Calls, Operations, device_of
from tests.gpu.machine import GPUS, OWN_GPU, TORCHRUN_VARIABLES, Machine
from tests.states import forget_states

_group_by_device_and_dtype = torch._C._group_tensors_by_device_and_dtype  # The real one.


def imitated_rank() -> contextlib.AbstractContextManager[Machine]:
    """This process as a rank that torchrun has started."""
    return imitated(Machine([OWN_GPU.index]), TORCHRUN_VARIABLES)


def imitated_process() -> contextlib.AbstractContextManager[Machine]:
    """This process without torchrun: it is alone, and all GPUs are its own."""
    return imitated(Machine(list(range(GPUS))), {})


@contextlib.contextmanager
def imitated(machine: Machine, environment: dict[str, str]) -> Iterator[Machine]:
    forget_states()
    with contextlib.ExitStack() as stack:
        stack.callback(forget_states)
        stack.callback(register_optimizer_step_post_hook(machine.count_step).remove)
        stack.enter_context(patch.dict(os.environ, environment))
        for stand_ins in (*gpu_patches(machine), *group_patches(machine), *wrapper_patches()):
            stack.enter_context(stand_ins)
        stack.enter_context(Calls(machine))
        stack.enter_context(Operations(machine))
        yield machine


def gpu_patches(machine: Machine) -> list:
    """Stand-ins for what would ask the driver, and for C++ that would find tensors of the CPU."""
    cuda = patch.multiple(
        torch.cuda,
        is_available=lambda: True,
        device_count=lambda: GPUS,
        get_device_properties=machine.get_device_properties,
        default_generators=[mock.Mock()] * GPUS,  # DataParallel's replicas draw dropout from them.
        get_rng_state=lambda: torch.zeros(16, dtype=torch.uint8),
        set_rng_state=lambda state: None,
        current_device=lambda: machine.current_gpu,
        set_device=machine.set_device,
        reset_peak_memory_stats=machine.reset_peak_memory_stats,
        max_memory_allocated=machine.max_memory_allocated,
        current_stream=machine.current_stream,  # An evaluation waits for the end of a copy to the CPU.
        is_current_stream_capturing=lambda: False,  # An older torch's optimizer asks it at each step.
    )
    accelerator = patch.multiple(
        torch.accelerator,
        is_available=lambda: True,  # A data loader asks before it pins.
        current_stream=machine.current_stream,  # An optimizer asks it at each step.
        synchronize=machine.synchronize,
    )
    # Optimizers and `clip_grad_norm_` compute in groups of tensors.
    groups = patch.object(torch._C, "_group_tensors_by_device_and_dtype", group_by_label_and_dtype)
    return [cuda, accelerator, groups]


def group_patches(machine: Machine) -> list:
    """Stand-ins for what would wait for other ranks. The core meets them in a store before it makes the group."""
    joining = patch.object(PartialState, "_join", lambda _, backend, *args: machine.init_process_group(backend))
    functions = patch.multiple(
        dist,
        init_process_group=machine.init_process_group,
        get_backend=lambda group=None: machine.backend,  # Torch would answer "fake"; a level expects nccl.
        barrier=machine.barrier,
        all_gather_object=gather_own_object,  # Torch would ask the group for its device: the CPU.
    )
    return [joining, functions]


def wrapper_patches() -> list:
    """Stand-ins for what would copy the module to other GPUs, or send its gradients to other ranks."""
    data_parallel = patch.object(nn.DataParallel, "forward", call_module)
    ddp = patch.multiple(DistributedDataParallel, __init__=init_ddp, forward=call_module)
    return [data_parallel, ddp]


def gather_own_object(values: list, value: Any, group: Any = None) -> None:
    values[:] = [value] * len(values)


def group_by_label_and_dtype(lists: list[list], with_indices: bool) -> dict:
    groups = {}
    for (_, dtype), (lists_of_group, indices) in _group_by_device_and_dtype(lists, with_indices).items():
        groups[device_of(lists_of_group[0][0]), dtype] = (lists_of_group, indices)
    return groups


def call_module(wrapper: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return wrapper.module(*args, **kwargs)


def init_ddp(ddp: nn.Module, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    nn.Module.__init__(ddp)
    ddp.module = module
    ddp.require_backward_grad_sync = True
