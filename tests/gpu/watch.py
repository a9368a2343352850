"""What the CPU waits for and what it reads too early, seen in each operation on a FakeTensor.

A `Watch` looks at every operation for mistakes that a real GPU would hide: the CPU waits for the GPU, or it reads
memory into which a copy from the GPU has not arrived. It also answers those that ask for a value, which no FakeTensor
has.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

_aten = torch.ops.aten
READS = (_aten._local_scalar_dense.default, _aten.equal.default)
INDEXINGS = (_aten.index.Tensor, _aten.index_put_.default, _aten._index_put_impl_.default)


class Misplaced(AssertionError):
    """Something that belongs to this rank's GPU is on another device, or was asked of another one."""


class Wait(NamedTuple):
    """The CPU waited for the GPU in `operation`, after `step` optimizer steps."""

    step: int
    operation: str


class Watch(TorchDispatchMode):
    """Looks at each operation.

    Attributes:
        check_collective: is called with the name and the tensors of each collective.
        integers: what a tensor of integers says its values are.
        waits: all Waits so far.
        steps: optimizer steps so far.
        collectives: the names of the collectives so far.
        computed_in: the dtypes of the layers' products of matrices so far.
        operations: the names of those so far that had a GPU's tensor among their arguments.
    """

    def __init__(self, check_collective: Callable[[str, list[Tensor]], None], integers: int) -> None:
        super().__init__()
        self.check_collective = check_collective
        self.integers = integers
        self.waits: list[Wait] = []
        self.steps = 0
        self.collectives: list[str] = []
        self.computed_in: set[torch.dtype] = set()
        self.operations: list[str] = []
        self._pinned: set[StorageWeakRef] = set()
        # Memory that a copy from the GPU is still to fill, and how many operations came before the copy's end.
        self._in_flight: dict[StorageWeakRef, int] = {}

    def note_wait(self, operation: str) -> None:
        self.waits.append(Wait(self.steps, operation))

    def pin(self, tensor: Tensor) -> Tensor:
        """Remember that the memory of `tensor` is pinned."""
        self._pinned.add(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return StorageWeakRef(tensor.untyped_storage()) in self._pinned

    def arrived(self, operations: int) -> None:
        """The GPU has done its first `operations`."""
        self._in_flight = {memory: copy for memory, copy in self._in_flight.items() if copy > operations}

    def check_arrived(self, tensor: Tensor) -> None:
        """Raise Misplaced if nobody has waited for the copy that fills `tensor`."""
        if StorageWeakRef(tensor.untyped_storage()) in self._in_flight:
            raise Misplaced("memory of the CPU is read before a copy from the GPU has arrived there")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = str(function)
        tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        on_gpu = any(tensor.device.type == "cuda" for tensor in tensors)
        if on_gpu:
            self.operations.append(name)
        if name.startswith("c10d."):
            self.collectives.append(name)
            self.check_collective(name, tensors)
        if function in READS:
            return self._read(function, args[0], on_gpu)
        if function is _aten.is_pinned.default:
            return self.is_pinned(args[0])
        if not function.is_view:
            for tensor in tensors:
                self.check_arrived(tensor)
        pins = kwargs.pop("pin_memory", False)
        result = function(*args, **kwargs)
        if pins:
            self.pin(result)
        self._look_at_result(function, args, kwargs, result)
        return result

    def _look_at_result(self, function, args, kwargs, result) -> None:
        if function is _aten.addmm.default:
            self.computed_in.add(result.dtype)
        elif function in INDEXINGS and args[0].device.type == "cuda":
            on_cpu = [index for index in args[1] if index is not None and index.device.type == "cpu"]
            if on_cpu:
                self.note_wait(f"{function} with indices on the CPU")
        elif function is _aten._to_copy.default:
            asynchronous = bool(kwargs.get("non_blocking"))
            if asynchronous and (args[0].device.type, result.device.type) == ("cuda", "cpu"):
                self.pin(result)  # torch takes pinned memory then
            self._look_at_copy(args[0], result, asynchronous)
        elif function is _aten.copy_.default:
            asynchronous = args[2] if len(args) > 2 else kwargs.get("non_blocking")
            self._look_at_copy(args[1], args[0], bool(asynchronous))

    def _read(self, function, tensor: Tensor, on_gpu: bool) -> bool | float:
        self.check_arrived(tensor)
        if on_gpu:
            self.note_wait(str(function))
        if tensor.dtype == torch.bool or function is _aten.equal.default:
            return True
        if not tensor.dtype.is_floating_point:
            return self.integers
        # A gradient scaler reads from the GPU, in float32, how many gradients are not finite. AdamW reads its step's
        # number from the CPU; samples are counted in float64. Both are divisors.
        return 0.0 if on_gpu and tensor.dtype == torch.float32 else 1.0

    def _look_at_copy(self, source: Tensor, target: Tensor, asynchronous: bool) -> None:
        if source.device == target.device:
            return
        if source.device.type == target.device.type:
            raise Misplaced(f"a copy from {source.device} to {target.device}")
        on_cpu = source if source.device.type == "cpu" else target
        way = f"from {source.device.type} to {target.device.type}"
        if not asynchronous:
            self.note_wait(f"copy {way}")
        elif not self.is_pinned(on_cpu):
            self.note_wait(f"copy {way}, not pinned")
        elif on_cpu is target:
            self._in_flight[StorageWeakRef(target.untyped_storage())] = len(self.operations)


class Event:
    """A mark in the GPU's queue. Who waits for it waits for the GPU, unless the GPU has more to do after it."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.operations_before = len(watch.operations)

    def synchronize(self) -> None:
        self.watch.arrived(self.operations_before)
        if self.operations_before == len(self.watch.operations):
            self.watch.note_wait("event.synchronize")
