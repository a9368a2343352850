"""The account of the memory of simulated devices: the bytes that each holds, by category, now and at its peak.

`common.memory.operations` charges the storages of tensors to the devices.
"""

import math
import threading
import weakref
from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

BLOCK = 512  # bytes
# Communication: the buckets and messages of collectives, scattered inputs, gathered outputs.
CATEGORIES = ("parameters", "gradients", "optimizer state", "activations", "communication", "temporaries")


@dataclass(eq=False)
class _Allocation:
    """A storage on a device. A peak keeps it, not sums by category: its category may become known only later."""

    device: int
    category: str = "temporaries"


@dataclass
class _Device:
    """The bytes of each allocation on a device, now and at its peak, and their sums."""

    held: dict[_Allocation, int] = field(default_factory=dict)
    total: int = 0
    at_peak: dict[_Allocation, int] = field(default_factory=dict)
    peak: int = 0


class MemoryTracker:
    """The bytes that each device holds now and held at its peak, by category."""

    def __init__(self) -> None:
        # It is reentrant because this thread may free a storage while it makes an entry.
        self._lock = threading.RLock()
        # The keys are the addresses of the charged storages that are alive. All others are on the host.
        self._allocations: dict[int, _Allocation] = {}
        self._devices: dict[int, _Device] = defaultdict(_Device)

    def peaks(self) -> dict[int, dict[str, int]]:
        """Per device the bytes in each of CATEGORIES at the moment when their sum was largest."""
        with self._lock:
            return {index: _by_category(self._devices[index].at_peak) for index in sorted(self._devices)}

    def reset_peaks(self) -> None:
        """Start again from the bytes held now, as `torch.cuda.reset_peak_memory_stats` does."""
        with self._lock:
            for device in self._devices.values():
                device.at_peak = dict(device.held)
                device.peak = device.total

    def now(self, device: int = 0) -> dict[str, int]:
        """The bytes in each of CATEGORIES that `device` holds now."""
        with self._lock:
            return _by_category(self._devices.get(device, _Device()).held)

    def device_of(self, tensor: Tensor) -> int | None:
        """The device that `tensor` is charged to; None for the host."""
        with self._lock:
            allocation = self._allocations.get(_plain(tensor).untyped_storage()._cdata)
            return allocation.device if allocation else None

    def charge(self, tensor: Tensor, device: int) -> None:
        """Charge the storage of a tensor to `device`, or to the one that holds it already, with its present size."""
        storage = _plain(tensor).untyped_storage()
        with self._lock:
            allocation = self._allocations.get(storage._cdata)
            if allocation is None:
                allocation = self._allocations[storage._cdata] = _Allocation(device)
                # torch keeps this Python object for as long as the storage lives, and gives it out again for every
                # tensor that shares the storage. So it ends when the storage is freed, not when its last name goes.
                weakref.finalize(storage, self._release, storage._cdata).atexit = False
            self._enter_size(allocation, storage)

    def label(self, tensor: Tensor, category: str) -> None:
        """Give a charged storage a category. If it has several, the first in the order of CATEGORIES counts."""
        with self._lock:
            allocation = self._allocations.get(_plain(tensor).untyped_storage()._cdata)
            if allocation is not None:
                allocation.category = min(allocation.category, category, key=CATEGORIES.index)

    def label_trained(self, optimizer: Optimizer) -> None:
        """Label the parameters of an optimizer, their gradients and their state."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self.label(parameter, "parameters")
                if parameter.grad is not None:
                    self.label(parameter.grad, "gradients")
                for value in optimizer.state.get(parameter, {}).values():
                    if isinstance(value, Tensor):
                        self.label(value, "optimizer state")

    def enter_resized_parameters(self, storage: torch.UntypedStorage) -> None:
        """Enter the new size of a storage that FSDP has resized, and label it: it holds gathered parameters."""
        with self._lock:
            allocation = self._allocations.get(storage._cdata)
            if allocation is not None:
                allocation.category = "parameters"
                self._enter_size(allocation, storage)

    def _enter_size(self, allocation: _Allocation, storage: torch.UntypedStorage) -> None:
        """Enter the bytes that CUDA's caching allocator would give out for a storage."""
        size = math.ceil(storage.nbytes() / BLOCK) * BLOCK
        device = self._devices[allocation.device]
        before = device.held.get(allocation, 0)
        device.total += size - before
        device.held[allocation] = size
        if device.total > device.peak:
            device.at_peak = dict(device.held)
            device.peak = device.total

    def _release(self, address: int) -> None:
        with self._lock:
            allocation = self._allocations.pop(address)
            device = self._devices[allocation.device]
            device.total -= device.held.pop(allocation)


def _by_category(held: dict[_Allocation, int]) -> dict[str, int]:
    split = dict.fromkeys(CATEGORIES, 0)
    for allocation, size in held.items():
        split[allocation.category] += size
    return split


def _plain(tensor: Tensor) -> Tensor:
    """The tensor that has the storage: that of this rank where `tensor` is a DTensor, else `tensor` itself."""
    if not is_traceable_wrapper_subclass(tensor):
        return tensor
    attributes, _ = tensor.__tensor_flatten__()
    return getattr(tensor, attributes[0])
