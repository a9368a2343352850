"""What a GPU would make the CPU wait for, and what it would hide: seen in each operation on a FakeTensor.

Every operation is asked four questions:

- does its result lie on this rank's own GPU?
- is nccl given tensors of the GPU only?
- does the CPU wait for the GPU here?
- does it read memory of the CPU into which a copy from the GPU has not arrived?
"""

from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

_aten = torch.ops.aten
READ = "aten._local_scalar_dense.default"  # .item(), .tolist(), float(), if
INDEXINGS = (_aten.index.Tensor, _aten.index_put_.default, _aten._index_put_impl_.default)


class Misplaced(AssertionError):
    """What belongs to this rank's GPU is on another device, is asked of another one, or is not there yet."""


class Watch(TorchDispatchMode):
    """Looks at each operation, while `with watch:` lasts.

    Args:
        own_gpus: the indices of the GPUs that this process is to use.

    Attributes:
        waits: for what the CPU waited before the first optimizer step, between it and the second, and so on: the list
            of names number n is of the time after n steps.
        operations: the names of those so far that had a GPU's tensor among their arguments: the GPU's queue.
        computed_in: the dtypes of the layers' products of matrices so far.
    """

    def __init__(self, own_gpus: range) -> None:
        super().__init__()
        self.waits: list[list[str]] = [[]]
        self.operations: list[str] = []
        self.computed_in: set[torch.dtype] = set()
        self._own_gpus = own_gpus
        self._pinned: set[StorageWeakRef] = set()
        # Memory of the CPU that a copy is to fill, and the length of the GPU's queue when the copy was put there.
        self._in_flight: dict[StorageWeakRef, int] = {}

    def count_step(self, *_: Any) -> None:
        """A hook after each optimizer step."""
        self.waits.append([])

    def note_wait(self, name: str) -> None:
        self.waits[-1].append(name)

    def pin(self, tensor: Tensor) -> Tensor:
        """Remember that the memory of `tensor` is pinned."""
        self._pinned.add(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    def pinned_copy(self, tensor: Tensor) -> Tensor:
        """In place of `Tensor.pin_memory`."""
        if tensor.is_cuda:
            raise RuntimeError("cannot pin a tensor of the GPU: only those of the CPU can be pinned")
        return self.pin(tensor.clone())

    def arrived(self, operations: int) -> None:
        """The GPU has done the first `operations` of its queue."""
        self._in_flight = {memory: position for memory, position in self._in_flight.items() if position > operations}

    def check_arrived(self, tensor: Tensor) -> None:
        """Raise Misplaced if nobody has waited for the copy that fills `tensor`."""
        if StorageWeakRef(tensor.untyped_storage()) in self._in_flight:
            raise Misplaced("memory of the CPU is read before a copy from the GPU has arrived there")

    def as_array(self, tensor: Tensor) -> numpy.ndarray:
        """In place of `Tensor.numpy`."""
        self.check_arrived(tensor)
        return numpy.zeros(tensor.shape, str(tensor.dtype).removeprefix("torch."))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(tensor.is_cuda for tensor in inputs):
            self.operations.append(str(function))
        self._check_inputs(function, inputs)
        if function is _aten._local_scalar_dense.default:
            return self._read(args[0])
        result = function(*args, **kwargs)
        self._look_at_result(function, result)
        self._look_for_wait(function, args, kwargs, result)
        return result

    def _check_inputs(self, function: Any, inputs: list[Tensor]) -> None:
        is_sent = function.namespace == "c10d" and dist.get_backend() == "nccl"
        for tensor in inputs:
            if is_sent and not tensor.is_cuda:
                raise Misplaced(f"{function} of a tensor on the CPU: nccl takes those of a GPU only")
            if not function.is_view:
                self.check_arrived(tensor)

    def _look_at_result(self, function: Any, result: Any) -> None:
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor) and tensor.is_cuda and tensor.device.index not in self._own_gpus:
                raise Misplaced(f"{function} makes a tensor on {tensor.device}, where other ranks compute")
        if function is _aten.addmm.default:
            self.computed_in.add(result.dtype)

    def _read(self, tensor: Tensor) -> float:
        """A value for those that ask for one, which no FakeTensor has."""
        if tensor.is_cuda:
            self.note_wait(READ)
        if tensor.dtype == torch.bool:  # are all weights finite?
            return True
        # From the GPU a gradient scaler reads, in float32, how many gradients are not finite, and a checkpoint's
        # schedule, in integers, whether a rank was told to stop. The rest are divisors: AdamW's step, counted samples.
        value = 0 if tensor.is_cuda and tensor.dtype != torch.float64 else 1
        return float(value) if tensor.is_floating_point() else value

    def _look_for_wait(self, function: Any, args: tuple, kwargs: dict, result: Any) -> None:
        if function in INDEXINGS and args[0].is_cuda:
            if any(index is not None and not index.is_cuda for index in args[1]):
                self.note_wait(f"{function} with indices on the CPU")
        elif function is _aten._to_copy.default:
            self._look_at_copy(args[0], result, kwargs.get("non_blocking", False), is_new=True)
        elif function is _aten.copy_.default:
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            self._look_at_copy(args[1], args[0], non_blocking, is_new=False)

    def _look_at_copy(self, source: Tensor, target: Tensor, non_blocking: bool, is_new: bool) -> None:
        if source.device == target.device:
            return
        if is_new and non_blocking and source.is_cuda:
            self.pin(target)  # torch takes pinned memory then
        on_cpu = target if source.is_cuda else source
        is_pinned = StorageWeakRef(on_cpu.untyped_storage()) in self._pinned
        way = f"from {source.device.type} to {target.device.type}"
        if not non_blocking:
            self.note_wait(f"copy {way}")
        elif not is_pinned:
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
