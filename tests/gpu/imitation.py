"""A process as one of eight ranks, each with a GPU, imitated on a machine that has none.

    with imitated_rank() as machine:
        module.train(args)
    machine.waits

Real are the level, the core and the Trainer; torch's modules, backward, optimizers and data loaders; all values; and
the order of all operations. Tensors on a GPU are those of `labels.py`, which are on the CPU and say that they are not.
The rest that is imitated stands in one table, `stand_ins`: what takes the name of a GPU raises if that is another
rank's, all ranks send what this one sends, and DataParallel and DDP call the bare module.

FSDP and meshes are not imitated, because they need more of torch.cuda: the tests train them on the CPU only. The README
says what else this cannot see.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.gpu.labels import Calls, Operations, device_of
from tests.gpu.machine import GPUS, OWN_GPU, TORCHRUN_VARIABLES, Machine
from tests.states import forget_states

_group_by_device_and_dtype = torch._C._group_tensors_by_device_and_dtype  # The real one.


def imitated_rank() -> contextlib.AbstractContextManager[Machine]:
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
        stack.enter_context(mock.patch.dict(os.environ, environment))
        for name, stand_in in stand_ins(machine).items():
            stack.enter_context(mock.patch(name, stand_in))
        stack.enter_context(Calls(machine))
        stack.enter_context(Operations(machine))
        yield machine


def stand_ins(machine: Machine) -> dict[str, Any]:
    """All that is imitated but the tensors, by the name of what it stands for."""
    return {
        # The driver would say that there is no GPU. A data loader asks torch.accelerator before it pins.
        "torch.cuda.is_available": lambda: True,
        "torch.accelerator.is_available": lambda: True,
        "torch.cuda.device_count": lambda: GPUS,
        "torch.cuda.get_device_properties": machine.get_device_properties,
        # Which GPU a process uses: that of another rank raises.
        "torch.cuda.current_device": lambda: machine.current_gpu,
        "torch.cuda.set_device": machine.set_device,
        # Where the CPU waits: the clock for the GPU, an evaluation for a copy. An optimizer asks its stream whether a
        # graph is being made.
        "torch.accelerator.synchronize": machine.synchronize,
        "torch.cuda.current_stream": machine.current_stream,
        "torch.accelerator.current_stream": machine.current_stream,
        "torch.cuda.is_current_stream_capturing": lambda: False,  # An older torch's optimizer asks this.
        # Each GPU has a peak of memory and a generator. Level 01 seeds all of them, in `seed_replicas`.
        "torch.cuda.reset_peak_memory_stats": machine.reset_peak_memory_stats,
        "torch.cuda.max_memory_allocated": machine.max_memory_allocated,
        "torch.cuda.default_generators": [mock.Mock()] * GPUS,
        "torch.cuda.get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "torch.cuda.set_rng_state": lambda state, device=None: None,
        # nccl would wait for the other ranks, and so would the core, which meets them in a store before. The group is
        # torch's "fake" one: a level expects nccl, and objects would be sent from the group's device, the CPU.
        "torch.distributed.init_process_group": machine.init_process_group,
        "common.accelerator.state.PartialState._join": machine.init_process_group,
        "torch.distributed.get_backend": lambda group=None: machine.backend,
        "torch.distributed.barrier": machine.barrier,
        "torch.distributed.all_gather_object": gather_own_object,
        # C++ sees no label. DataParallel and DDP would copy and send, optimizers compute in groups of one device.
        "torch.nn.DataParallel.forward": call_module,
        "torch.nn.parallel.DistributedDataParallel.__init__": init_ddp,
        "torch.nn.parallel.DistributedDataParallel.forward": call_module,
        "torch._C._group_tensors_by_device_and_dtype": group_by_label_and_dtype,
    }


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
