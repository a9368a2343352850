"""Tensors of the CPU with a label: the device on which they would be on a machine with GPUs.

    x = torch.zeros(2, device="cuda:1")    computed on the CPU, and labelled cuda:1
    x.device                               cuda:1
    y = x + 1                              has the label of x
    y.to("cpu")                            a copy without a label; the CPU would wait for it
    y + torch.ones(2)                      raises `Misplaced`, as torch raises where two devices meet

The label belongs to the memory, so all views of a tensor have it. The values are real: everything computes as on the
CPU, backward included. Two of torch's modes give the labels: `Calls` sees the calls in Python that ask for a device or
name one, and `Operations` sees every operation, those of backward too.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tests.gpu.machine import READ, Machine, Misplaced

CPU = torch.device("cpu")


def device_of(tensor: Tensor) -> torch.device:
    return getattr(tensor.untyped_storage(), "label", CPU)


def is_on_gpu(tensor: Tensor) -> bool:
    return device_of(tensor) != CPU


def set_label(tensor: Tensor, device: torch.device) -> None:
    tensor.untyped_storage().label = device  # torch keeps this object for as long as the memory.


def note_copy(machine: Machine, source: Tensor, target: torch.device, non_blocking: bool) -> None:
    """Note a wait if the copy goes to another device and the CPU cannot go on meanwhile."""
    if device_of(source) == target:
        return
    way = f"copy from {device_of(source).type} to {target.type}"
    if not non_blocking:
        machine.note_wait(way)
    elif target != CPU and not hasattr(source.untyped_storage(), "is_pinned_copy"):
        machine.note_wait(f"{way}, not pinned")


class Calls(TorchFunctionMode):
    """Answers the calls in Python that ask for the device of a tensor or name one, or that a GPU's tensor refuses."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function == Tensor.device.__get__:
            return device_of(args[0])
        if function == Tensor.is_cuda.__get__:
            return is_on_gpu(args[0])
        if function == Tensor.pin_memory:
            copy = args[0].clone()
            copy.untyped_storage().is_pinned_copy = True
            return copy
        if function == Tensor.cpu:
            return self._to(args[0], CPU)
        if function == Tensor.to:
            return self._to(*args, **kwargs)
        if function == Tensor.numpy and is_on_gpu(args[0]):
            raise Misplaced("numpy() of a tensor on a GPU")
        if function == Tensor.tolist and is_on_gpu(args[0]):
            self.machine.note_wait(READ)
        if kwargs.get("device") is None or torch.device(kwargs["device"]) == CPU:
            return function(*args, **kwargs)
        result = function(*args, **{**kwargs, "device": CPU})
        if function in (torch.tensor, torch.as_tensor):  # The data are on the CPU, and are copied.
            return self._to(result, kwargs["device"])
        set_label(result, self.machine.own_gpu(kwargs["device"], function.__name__))
        return result

    def _to(self, tensor: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
        """`tensor.to(…)`, for any of its signatures."""
        target, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        if target is None:
            target = device_of(tensor)
        if args and isinstance(args[0], Tensor):
            target = device_of(args[0])
        if target.type == "cuda":
            target = self.machine.own_gpu(target, "to()")
        note_copy(self.machine, tensor, target, non_blocking)
        result = tensor if dtype is None else tensor.to(dtype)
        if copy or target != device_of(tensor):
            result = result.clone()
            set_label(result, target)
        return result


class Operations(TorchDispatchMode):
    """Labels the result of each operation as its inputs are, and notes where the CPU would wait."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        if function.namespace == "c10d":
            self._check_collective(function, inputs)
        if function is torch.ops.aten.copy_.default:
            target, source, *non_blocking = args
            note_copy(self.machine, source, device_of(target), any(non_blocking))
            return function(*args, **kwargs)
        device = common_device(function, inputs)
        if function is torch.ops.aten._local_scalar_dense.default and device != CPU:
            self.machine.note_wait(READ)
        results = function(*args, **kwargs)
        if device != CPU:
            for leaf in tree_iter(results):
                if isinstance(leaf, Tensor):
                    set_label(leaf, device)
        return results

    def _check_collective(self, function: Any, inputs: list[Tensor]) -> None:
        self.machine.collectives.append(str(function))
        if self.machine.backend == "nccl" and not all(is_on_gpu(tensor) for tensor in inputs):
            raise Misplaced(f"{function} of a tensor on the CPU: nccl takes those of a GPU only")


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
