"""The operations of a thread, whose results are charged to the simulated devices."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode_temporarily

from common.memory.tracker import MemoryTracker

_active: MemoryTracker | None = None  # None: no memory is tracked in this process


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
        with _Operations(tracker), label_activations(tracker), _track_moves_and_sizes(tracker):
            yield tracker
    finally:
        hook.remove()
        _active = None


def label_activations(tracker: MemoryTracker) -> saved_tensors_hooks:
    """A block in which this thread's activations are labelled: the tensors that autograd saves for backward."""

    def keep(tensor: Tensor) -> Tensor:
        tracker.label(tensor, "activations")
        return tensor

    return saved_tensors_hooks(keep, lambda tensor: tensor)


def label(tensor: Tensor, category: str) -> None:
    """Give `tensor` a category, one of CATEGORIES, if memory is tracked. A tensor on the host has no category."""
    if _active is not None:
        _active.label(tensor, category)


class _Operations(TorchDispatchMode):
    """A mode in which torch hands over each operation of this thread, whose results are then charged."""

    def __init__(self, tracker: MemoryTracker) -> None:
        super().__init__()
        self.tracker = tracker

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False, because keeping torch's compiler out of each call takes longer than the call."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            # A DTensor runs its operations on the plain tensor that it holds, and that one comes here too.
            return NotImplemented
        kwargs = kwargs or {}
        inputs = tensors_in((args, kwargs))
        devices = map(self.tracker.device_of, inputs)
        device = next((device for device in devices if device is not None), None)
        if device is None:  # All are on the host, and so are the results.
            return func(*args, **kwargs)
        if func is torch.ops.aten.copy_.default:
            inputs = inputs[:1]  # On a GPU, too, a copy from the host reads the source there.
        for tensor in inputs:
            if tensor.dim() > 0:  # Single numbers may stay on the host.
                self.tracker.charge(tensor, device)
        if func.namespace == "c10d":  # The inputs of a collective are its messages, and the buffers that receive them.
            for tensor in inputs:
                self.tracker.label(tensor, "communication")
        results = func(*args, **kwargs)
        for tensor in tensors_in(results):
            self.tracker.charge(tensor, device)
        return results


def tensors_in(nested) -> list[Tensor]:
    """The tensors in the arguments or results of an operation. torch's own `tree_iter` takes five times as long."""
    if isinstance(nested, Tensor):
        return [nested]
    if isinstance(nested, dict):
        nested = nested.values()
    elif not isinstance(nested, list | tuple):
        return []
    found = []
    for value in nested:
        found += tensors_in(value)
    return found


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
        # The CPU plays the part of a GPU here, so a script that moves a tensor to "cpu" means device 0.
        if names_device and result.device.type == "cpu" and tracker.device_of(result) is None:
            return tracked_copy(result, None, 0, "temporaries")
        return result

    def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        torch_resize(storage, size)
        tracker.enter_resized_parameters(storage)
        return storage

    with patch.object(Tensor, "to", to), patch.object(torch.UntypedStorage, "resize_", resize):
        yield


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
        label(gradient, category)
        return _copied(gradient, ctx.source, category), None, None, None


def _copied(tensor: Tensor, device: int | None, category: str) -> Tensor:
    """A copy of a tensor on a device (None: the host), to which it is charged if memory is tracked."""
    # `_Operations`, the innermost mode, would charge it to the device of `tensor`. The modes around it stay.
    is_tracked = isinstance(_get_current_dispatch_mode(), _Operations)
    with _pop_mode_temporarily() if is_tracked else nullcontext():
        result = tensor.clone()
    if _active is not None and device is not None:
        _active.charge(result, device)
        _active.label(result, category)
    return result
