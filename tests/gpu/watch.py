"""What a GPU would make the CPU wait for, and what it would hide: seen in each operation on a FakeTensor.

Every operation is asked four questions:

- does its result lie on this rank's own GPU?
- is nccl given tensors of the GPU only?
- does the CPU wait for the GPU here?
- does it read memory of the CPU into which a copy from the GPU has not arrived?
"""

from types import SimpleNamespace
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
        operations: the names of those so far that had a GPU's tensor among their arguments.
        computed_in: the dtypes of the layers' products of matrices so far.
    """

    def __init__(self, own_gpus: range) -> None:
        super().__init__()
        self.waits: list[list[str]] = [[]]
        self.operations: list[str] = []
        self.computed_in: set[torch.dtype] = set()
        self._own_gpus = own_gpus
        self._pinned: set[StorageWeakRef] = set()
        self._in_flight: set[StorageWeakRef] = set()  # memory of the CPU that copies from the GPU are to fill

    def count_step(self, *_: Any) -> None:
        """A hook after each optimizer step."""
        self.waits.append([])

    def note_wait(self, name: str) -> None:
        self.waits[-1].append(name)

    def pinned_copy(self, tensor: Tensor) -> Tensor:
        """In place of `Tensor.pin_memory`."""
        copy = tensor.clone()
        self._pinned.add(memory_of(copy))
        return copy

    def note_all_arrived(self) -> None:
        """The CPU has waited until the GPU had nothing left to do."""
        self._in_flight.clear()

    def record_event(self) -> SimpleNamespace:
        """An event: whoever waits for it knows that the copies up to here have arrived."""
        copies = set(self._in_flight)
        return SimpleNamespace(synchronize=lambda: self._in_flight.difference_update(copies))

    def as_array(self, tensor: Tensor) -> numpy.ndarray:
        """In place of `Tensor.numpy`."""
        self._check_arrived(tensor)
        return numpy.zeros(tensor.shape, str(tensor.dtype).removeprefix("torch."))

    def _check_arrived(self, tensor: Tensor) -> None:
        if memory_of(tensor) in self._in_flight:
            raise Misplaced("memory of the CPU is read before a copy from the GPU has arrived there")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(tensor.is_cuda for tensor in inputs):
            self.operations.append(str(function))
        self._check_inputs(function, inputs)
        if function is _aten._local_scalar_dense.default:
            return self._read(args[0])
        result = function(*args, **kwargs)
        self._check_result(function, result)
        if function in INDEXINGS:
            self._note_indexing(function, *args[:2])
        elif function is _aten._to_copy.default:
            self._note_copy(args[0], result, kwargs.get("non_blocking", False), is_new=True)
        elif function is _aten.copy_.default:
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            self._note_copy(args[1], args[0], non_blocking, is_new=False)
        return result

    def _check_inputs(self, function: Any, inputs: list[Tensor]) -> None:
        is_sent = function.namespace == "c10d" and dist.get_backend() == "nccl"
        for tensor in inputs:
            if is_sent and not tensor.is_cuda:
                raise Misplaced(f"{function} of a tensor on the CPU: nccl takes those of a GPU only")
            if not function.is_view:
                self._check_arrived(tensor)

    def _check_result(self, function: Any, result: Any) -> None:
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

    def _note_indexing(self, function: Any, tensor: Tensor, indices: list[Tensor | None]) -> None:
        if tensor.is_cuda and any(index is not None and not index.is_cuda for index in indices):
            self.note_wait(f"{function} with indices on the CPU")

    def _note_copy(self, source: Tensor, target: Tensor, non_blocking: bool, is_new: bool) -> None:
        if source.device == target.device:
            return
        way = f"from {source.device.type} to {target.device.type}"
        memory = memory_of(target if source.is_cuda else source)
        is_pinned = memory in self._pinned or (is_new and source.is_cuda)  # for a new copy torch takes pinned memory
        if not non_blocking:
            self.note_wait(f"copy {way}")
        elif not is_pinned:
            self.note_wait(f"copy {way}, not pinned")
        elif source.is_cuda:
            self._in_flight.add(memory)


def memory_of(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())
