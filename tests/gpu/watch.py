"""Waits of the CPU for a GPU, and tensors on a wrong device: seen in each operation on a FakeTensor."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

_aten = torch.ops.aten
READ = "aten._local_scalar_dense.default"  # .item(), .tolist(), float(), if
INDEXINGS = (_aten.index.Tensor, _aten.index_put_.default, _aten._index_put_impl_.default)
# FakeTensors have no values, and a training asks for some. Each kind has a dtype of its own.
WEIGHTS_ARE_FINITE = True
SIGNALS_TO_STOP = 0
INFINITE_GRADIENTS = 0.0
SUM_IN_AN_EVALUATION = 1.0  # one of them divides the others
VALUES_ON_GPU = {
    torch.bool: WEIGHTS_ARE_FINITE,
    torch.int64: SIGNALS_TO_STOP,
    torch.float32: INFINITE_GRADIENTS,
    torch.float64: SUM_IN_AN_EVALUATION,
}
STEPS_OF_ADAMW = 1  # which it counts on the CPU


class Misplaced(AssertionError):
    """A tensor or a call that belongs to this rank's GPU, on another device."""


class Watch(TorchDispatchMode):
    """Looks at each operation, while `with watch:` lasts.

    Args:
        own_gpus: the indices of the GPUs that this process is to use.

    Attributes:
        waits: for what the CPU waited: `waits[n]` has the names of the waits between optimizer steps n and n + 1.
        collectives: the names of those so far.
    """

    def __init__(self, own_gpus: range) -> None:
        super().__init__()
        self.waits: list[list[str]] = [[]]
        self.collectives: list[str] = []
        self._own_gpus = own_gpus
        self._pinned: set[StorageWeakRef] = set()

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

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function.namespace == "c10d":
            self._check_collective(function, args)
        if function is _aten._local_scalar_dense.default:
            return self._read(args[0])
        result = function(*args, **kwargs)
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor) and tensor.is_cuda and tensor.device.index not in self._own_gpus:
                raise Misplaced(f"{function} makes a tensor on {tensor.device}, where other ranks compute")
        if function in INDEXINGS:
            self._note_indexing(function, *args[:2])
        elif function is _aten._to_copy.default:
            self._note_copy(args[0], result, kwargs.get("non_blocking", False))
        elif function is _aten.copy_.default:
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            self._note_copy(args[1], args[0], non_blocking)
        return result

    def _check_collective(self, function: Any, args: tuple) -> None:
        self.collectives.append(str(function))
        if dist.get_backend() == "nccl" and any(isinstance(leaf, Tensor) and leaf.is_cpu for leaf in tree_iter(args)):
            raise Misplaced(f"{function} of a tensor on the CPU: nccl takes those of a GPU only")

    def _read(self, tensor: Tensor) -> float:
        if not tensor.is_cuda:
            return STEPS_OF_ADAMW
        self.note_wait(READ)
        if tensor.dtype not in VALUES_ON_GPU:
            raise NotImplementedError(f"{READ} of a {tensor.dtype} on a GPU: give it a value in VALUES_ON_GPU")
        return VALUES_ON_GPU[tensor.dtype]

    def _note_indexing(self, function: Any, tensor: Tensor, indices: list[Tensor | None]) -> None:
        if tensor.is_cuda and any(index is not None and not index.is_cuda for index in indices):
            self.note_wait(f"{function} with indices on the CPU")

    def _note_copy(self, source: Tensor, target: Tensor, non_blocking: bool) -> None:
        if source.device == target.device:
            return
        way = f"copy from {source.device.type} to {target.device.type}"
        if not non_blocking:
            self.note_wait(way)
        elif target.is_cuda and memory_of(source) not in self._pinned:
            self.note_wait(f"{way}, not pinned")


def memory_of(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())
