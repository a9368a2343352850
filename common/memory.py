"""Count the tensor bytes that each of N GPUs would hold, on a machine that has none.

The simulated devices are numbers; device 0 is the process's own. Within `track_memory()` every operation's result is
charged to the device on which it would be on a machine with GPUs:

- a tensor made without a device is on the host and not charged: datasets, batches, a model before `.to(device)`;
- `.to(device)` moves it to device 0, and `tracked_copy` to any device, such as that of a replica;
- a result is where its inputs are; a host tensor in an operation with device tensors is moved to their device;
- storage that FSDP resizes counts with its new size, and a copy that gloo alone needs is not counted.

Storage is rounded up to 512 bytes as CUDA's caching allocator does, and released when its last tensor dies.
"""

import math
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _pop_mode_temporarily,
    is_traceable_wrapper_subclass,
)

BLOCK = 512
# Communication: the buckets and messages of collectives, scattered inputs, gathered outputs.
CATEGORIES = ("parameters", "gradients", "optimizer state", "activations", "communication", "temporaries")


@dataclass(eq=False)
class _Allocation:
    """A storage, of which its device holds `size` bytes. Its category may become known only after the peak.

    `device` is None on the host. A storage that is left out is never charged to a device.
    """

    device: int | None = None
    size: int = 0
    category: str = "temporaries"
    is_left_out: bool = False


@dataclass
class _Device:
    """The bytes of each allocation on a device, now and at its peak, and their sums."""

    held: dict[_Allocation, int] = field(default_factory=dict)
    total: int = 0
    at_peak: dict[_Allocation, int] = field(default_factory=dict)
    peak: int = 0


class MemoryTracker:
    """The bytes that are held now, by device and category, and each device's at its peak."""

    def __init__(self) -> None:
        # It is reentrant because this thread may free a storage while it makes an entry.
        self._lock = threading.RLock()
        # The keys are the addresses of the storages that are alive.
        self._allocations: dict[int, _Allocation] = {}
        self._devices: dict[int, _Device] = {}

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
            allocation = self._allocations.get(tensor.untyped_storage()._cdata)
            return allocation.device if allocation else None

    def charge(self, tensor: Tensor, device: int | None) -> None:
        """Charge the storage of a tensor to `device`, or to the one that holds it already, with its present size."""
        storage = tensor.untyped_storage()
        with self._lock:
            allocation = self._allocations.get(storage._cdata) or self._enter(storage)
            if allocation.device is None and not allocation.is_left_out:
                allocation.device = device
            self._resize(allocation, _in_blocks(storage))

    def leave_out_if_unknown(self, tensor: Tensor) -> None:
        """Charge the storage of `tensor` to no device, whatever it meets, unless it has been entered already."""
        storage = tensor.untyped_storage()
        with self._lock:
            if storage._cdata not in self._allocations:
                self._enter(storage).is_left_out = True

    def label(self, tensor: Tensor, category: str) -> None:
        """Give a storage a category. If it has several, the first in the order of CATEGORIES counts."""
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
                for value in optimizer.state[parameter].values():
                    if isinstance(value, Tensor):
                        self.label(value, "optimizer state")

    def enter_resized_parameters(self, storage: torch.UntypedStorage) -> None:
        """Enter the new size of a storage of gathered parameters, which was resized without an operation."""
        with self._lock:
            allocation = self._allocations.get(storage._cdata)
            if allocation is not None:
                allocation.category = "parameters"
                self._resize(allocation, _in_blocks(storage))

    def _enter(self, storage: torch.UntypedStorage) -> _Allocation:
        allocation = self._allocations[storage._cdata] = _Allocation()
        weakref.finalize(storage, self._release, storage._cdata).atexit = False
        return allocation

    def _resize(self, allocation: _Allocation, size: int) -> None:
        added = size - allocation.size
        if allocation.device is None or added == 0:
            return
        allocation.size = size
        device = self._devices.setdefault(allocation.device, _Device())
        device.held[allocation] = size
        device.total += added
        if device.total > device.peak:
            device.at_peak = dict(device.held)
            device.peak = device.total

    def _release(self, address: int) -> None:
        with self._lock:
            allocation = self._allocations.pop(address)
            device = self._devices.get(allocation.device)
            if device is not None:
                device.total -= device.held.pop(allocation, 0)


def _by_category(held: dict[_Allocation, int]) -> dict[str, int]:
    split = dict.fromkeys(CATEGORIES, 0)
    for allocation, size in held.items():
        split[allocation.category] += size
    return split


_active: MemoryTracker | None = None  # None: no memory is tracked in this process


def name_category(tensor: Tensor, category: str) -> None:
    """Say what `tensor` is, one of CATEGORIES, if memory is tracked."""
    if _active is not None:
        _active.label(tensor, category)


def tracked_copy(tensor: Tensor, source: int | None, target: int, category: str = "communication") -> Tensor:
    """A copy on device `target` of a tensor on device `source` (None: the host), to which gradients flow back.

    Where the two are the same nothing is copied and the result shares the tensor's storage. `category` says what the
    copy is; what flows back through a copy of parameters is a gradient.
    """
    if source == target:
        return tensor.view_as(tensor)
    return _Copy.apply(tensor, source, target, category)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: Tensor, source: int | None, target: int, category: str) -> Tensor:
        ctx.source = source
        ctx.category = category
        return _copied(tensor, target, category)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        category = "gradients" if ctx.category == "parameters" else ctx.category
        name_category(gradient, category)
        return _copied(gradient, ctx.source, category), None, None, None


def _copied(tensor: Tensor, device: int | None, category: str) -> Tensor:
    """A copy of a tensor, charged to a device if memory is tracked."""
    # `_Operations`, the innermost mode, would charge it to the device of `tensor`. The modes around it stay.
    is_tracked = isinstance(_get_current_dispatch_mode(), _Operations)
    with _pop_mode_temporarily() if is_tracked else nullcontext():
        result = tensor.clone()
    if _active is not None:
        _active.charge(_plain(result), device)
        _active.label(result, category)
    return result


class _Operations(TorchDispatchMode):
    """A mode in which torch hands over each operation of this thread, whose results are then charged."""

    def __init__(self, tracker: MemoryTracker) -> None:
        super().__init__()
        self.tracker = tracker
        self.previous_operation = ""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False, because keeping torch's compiler out of each call takes longer than the call."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            # A DTensor runs its operations on the plain tensor that it holds, and that one comes here too.
            return NotImplemented
        kwargs = kwargs or {}
        inputs = _tensors((args, kwargs))
        if self._splits_gloos_copy(func):
            self.tracker.leave_out_if_unknown(inputs[0])
        self.previous_operation = func.name()
        if func.namespace == "c10d":  # A collective sends its inputs.
            for tensor in inputs:
                self.tracker.label(tensor, "communication")
        device = self._common_device(inputs)
        if device is not None:
            self._move_inputs(inputs, device)
        results = func(*args, **kwargs)
        for tensor in _tensors(results):
            self.tracker.charge(tensor, device)
        return results

    def _splits_gloos_copy(self, func) -> bool:
        """True for the operation by which gloo, in torch 2.15, splits the copy that it makes for a reduce-scatter.

        gloo has no reduce-scatter: it reduces a copy of the whole message, and splits that right after. nccl makes no
        copy, and when gloo frees it depends on its threads.
        """
        return func is torch.ops.aten.split.Tensor and self.previous_operation == "c10d::_reduce_scatter_base_"

    def _common_device(self, inputs: list[Tensor]) -> int | None:
        """The first device that holds an input; None if all are on the host."""
        devices = map(self.tracker.device_of, inputs)
        return next((device for device in devices if device is not None), None)

    def _move_inputs(self, inputs: list[Tensor], device: int) -> None:
        """Charge to `device` the inputs that are on the host. Single numbers may stay there."""
        for tensor in inputs:
            if tensor.dim() and self.tracker.device_of(tensor) is None:
                self.tracker.charge(tensor, device)


@contextmanager
def _track_moves_and_sizes(tracker: MemoryTracker) -> Iterator[None]:
    """Replace two methods of torch that start no operation on a CPU, and so are not seen by `_Operations`.

    `Tensor.to(device)` makes the copy that a GPU would need. `UntypedStorage.resize_`, by which FSDP frees gathered
    parameters and fills them again, tells the tracker the new size.
    """
    torch_to = Tensor.to
    torch_resize = torch.UntypedStorage.resize_

    def to(tensor: Tensor, *args, **kwargs) -> Tensor:
        result = torch_to(tensor, *args, **kwargs)
        target = args[0] if args else kwargs.get("device")  # The first argument may also be a dtype or a tensor.
        names_device = isinstance(target, str | torch.device | int)
        if names_device and result.device.type == "cpu" and tracker.device_of(result) is None:
            return tracked_copy(result, None, 0, "temporaries")
        return result

    def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        torch_resize(storage, size)
        tracker.enter_resized_parameters(storage)
        return storage

    with patch.object(Tensor, "to", to), patch.object(torch.UntypedStorage, "resize_", resize):
        yield


def _in_blocks(storage: torch.UntypedStorage) -> int:
    """The bytes that CUDA's caching allocator would give out for a storage."""
    return math.ceil(storage.nbytes() / BLOCK) * BLOCK


def _plain(tensor: Tensor) -> Tensor:
    """The tensor that has the storage: that of this rank where `tensor` is a DTensor, else `tensor` itself."""
    if not is_traceable_wrapper_subclass(tensor):
        return tensor
    attributes, _ = tensor.__tensor_flatten__()
    return getattr(tensor, attributes[0])


def _tensors(nested) -> list[Tensor]:
    """The tensors in the arguments or results of an operation. torch's own `tree_iter` takes five times as long."""
    if isinstance(nested, Tensor):
        return [nested]
    if isinstance(nested, dict):
        nested = nested.values()
    elif not isinstance(nested, list | tuple):
        return []
    found = []
    for value in nested:
        found += _tensors(value)
    return found


@contextmanager
def track_memory() -> Iterator[MemoryTracker]:
    """Charge everything that this thread does. A process can have one tracker at a time."""
    global _active
    if _active is not None:
        raise RuntimeError("track_memory() is active already")
    tracker = MemoryTracker()
    hook = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: tracker.label_trained(optimizer))
    _active = tracker
    try:
        with observed(tracker), _track_moves_and_sizes(tracker):
            yield tracker
    finally:
        hook.remove()
        _active = None


@contextmanager
def observed(tracker: MemoryTracker) -> Iterator[None]:
    """Charge this thread's operations: torch's modes and hooks are of one thread, so each has to enter them."""

    def keep(tensor: Tensor) -> Tensor:
        tracker.label(tensor, "activations")
        return tensor

    # Activations are the tensors that autograd saves for backward.
    with _Operations(tracker), saved_tensors_hooks(keep, lambda tensor: tensor):
        yield
