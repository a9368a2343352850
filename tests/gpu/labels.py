"""Tensors of the CPU with a label: the device on which they would be on a machine with GPUs.

    x = torch.zeros(2, device="cuda:1")    computed on the CPU, and labelled cuda:1
    x.device                               cuda:1
    y = x + 1                              has the label of x
    y.to("cpu")                            a copy without a label; the CPU would wait for it
    y + torch.ones(2)                      raises `Misplaced`, as torch raises where two devices meet

The label belongs to the memory, so all views of a tensor have it. It is an attribute of the storage, an object that
torch keeps for as long as the memory. The values are real: everything computes as on the CPU, backward included.

Two of torch's modes see all that happens to tensors:

    mode         sees                        decides
    Calls        calls in Python             what a tensor's device is; the label of what is made on a device or sent to
                                             one, and the wait for that copy; that `numpy` takes no GPU's tensor
    Operations   all that is then computed,  the label of a result, which is that of the inputs; whether they may meet;
                 in backward too             the wait for `copy_`, and for a value or a length that is read

Both tell `machine.py` of the waits.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tests.gpu.machine import LENGTH, READ, Machine, Misplaced

CPU = torch.device("cpu")
# Calls that read values by no operation. A single number is formatted by one, so that this wait is noted twice.
READERS = (Tensor.tolist, Tensor.__repr__, Tensor.__format__)


def device_of(tensor: Tensor) -> torch.device:
    return getattr(tensor.untyped_storage(), "label", CPU)


def is_on_gpu(tensor: Tensor) -> bool:
    return device_of(tensor) != CPU


def set_label(tensor: Tensor, device: torch.device) -> None:
    tensor.untyped_storage().label = device


def pinned_copy(tensor: Tensor, *device: Any) -> Tensor:
    copy = tensor.clone()
    copy.untyped_storage().pinned = True
    return copy


def is_pageable(tensor: Tensor) -> bool:
    """True for memory of the CPU that is not pinned. Its copies are waited for even with `non_blocking`."""
    return not is_on_gpu(tensor) and not hasattr(tensor.untyped_storage(), "pinned")


def note_copy(machine: Machine, source: torch.device, target: torch.device, is_waited_for: bool) -> None:
    """Note the wait for a copy to another device. On the same device there is nothing to wait for."""
    if is_waited_for and source != target:
        machine.note_wait(f"copy from {source.type} to {target.type}")


class Calls(TorchFunctionMode):
    """The mode that answers calls in Python."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine
        self.answers = {
            Tensor.device.__get__: device_of,
            Tensor.is_cuda.__get__: is_on_gpu,
            Tensor.pin_memory: pinned_copy,
            Tensor.to: self.to,
            Tensor.cpu: self.cpu,
            Tensor.numpy: self.numpy,
        }

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in self.answers:
            return self.answers[function](*args, **kwargs)
        if function in READERS and is_on_gpu(args[0]):
            self.machine.note_wait(READ)
        if kwargs.get("device") is None:  # `Operations` gives the result the label of the inputs.
            return function(*args, **kwargs)
        device = torch.device(kwargs["device"])
        result = function(*args, **(kwargs | {"device": CPU}))
        # The data of these two may lie on another device: this is a copy, which may be waited for.
        if function in (torch.tensor, torch.as_tensor):
            return self.to(result, device)
        # All others, such as `zeros`, make a new tensor on the device.
        set_label(result, self.find_device(device, function.__name__))
        return result

    def find_device(self, device: torch.device, caller: str) -> torch.device:
        return CPU if device.type == "cpu" else self.machine.find_own_gpu(device, caller)

    def to(self, tensor: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
        target, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        if target is None:
            target = device_of(tensor)
        if args and isinstance(args[0], Tensor):
            target = device_of(args[0])
        target = self.find_device(target, "to()")
        is_waited_for = not non_blocking or is_pageable(tensor)  # torch pins the memory of a new tensor on the CPU.
        note_copy(self.machine, device_of(tensor), target, is_waited_for)
        result = tensor.to(dtype=dtype, memory_format=memory_format)
        if copy or target != device_of(tensor):
            result = result.clone()
            set_label(result, target)
        return result

    def cpu(self, tensor: Tensor, **kwargs: Any) -> Tensor:
        return self.to(tensor, CPU, **kwargs)

    def numpy(self, tensor: Tensor, *, force: bool = False) -> Any:
        if is_on_gpu(tensor) and not force:
            raise Misplaced("numpy() of a tensor on a GPU")
        return self.to(tensor, CPU).numpy(force=force)


class Operations(TorchDispatchMode):
    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        if function.namespace == "c10d":
            self.machine.collectives.append(str(function))
            if self.machine.backend == "nccl" and not all(map(is_on_gpu, inputs)):
                raise Misplaced(f"{function} of a tensor on the CPU: nccl takes those of a GPU only")
        if function is torch.ops.aten.copy_.default:
            target, source, *non_blocking = args
            is_waited_for = not any(non_blocking) or is_pageable(source) or is_pageable(target)
            note_copy(self.machine, device_of(source), device_of(target), is_waited_for)
            return function(*args, **kwargs)
        device = common_device(function, inputs)
        if function._schema.is_mutable:
            check_written(function, args[0], device)
        results = function(*args, **kwargs)
        if device != CPU:
            if torch.Tag.data_dependent_output in function.tags:
                self.machine.note_wait(READ)
            if reads_length(function, args):
                self.machine.note_wait(LENGTH)
            for leaf in tree_iter(results):
                if isinstance(leaf, Tensor):
                    set_label(leaf, device)
        return results


def reads_length(function: Any, args: tuple) -> bool:
    """True if the CPU has to read a length that depends on values, such as the number of True in a mask."""
    if function is torch.ops.aten.index.Tensor:
        return any(index.dtype == torch.bool for index in args[1] if index is not None)
    return torch.Tag.dynamic_output_shape in function.tags


def common_device(function: Any, inputs: list[Tensor]) -> torch.device:
    """The device of an operation's inputs, the CPU if there are none. Single numbers of the CPU go with any device.

    Raises:
        Misplaced: if there are several devices. That is stricter than torch where a tensor of a GPU has indices on the
            CPU: torch copies them, and the CPU waits.
    """
    devices = {device_of(tensor) for tensor in inputs if tensor.dim() > 0 or is_on_gpu(tensor)}
    if len(devices) > 1:
        raise Misplaced(f"{function} of tensors on {' and '.join(sorted(map(str, devices)))}")
    return devices.pop() if devices else CPU


def check_written(function: Any, target: Any, device: torch.device) -> None:
    """Raise Misplaced if the target of an operation in place, such as `add_`, is not on the other inputs' device.

    `common_device` lets single numbers of the CPU pass. As a target they may not: torch raises too.
    """
    for tensor in tree_iter(target):
        if isinstance(tensor, Tensor) and device_of(tensor) != device:
            raise Misplaced(f"{function} writes a tensor on {device_of(tensor)} from one on {device}")
