"""Waits of the CPU for a GPU, and tensors on a wrong device: seen in each operation on a FakeTensor."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

_aten = torch.ops.aten
READ = "aten._local_scalar_dense.default"  # `item`, `tolist`, `float` and `if` of a tensor do it.
ARRIVED = "a copy to the CPU has arrived"
INDEXINGS = (_aten.index.Tensor, _aten.index_put_.default, _aten._index_put_impl_.default)
ORDERS = (_aten.randperm.default, _aten.randperm.generator)
# FakeTensors have no values. In these files one is read from a GPU; each read gets what lets the training go on.
VALUES_ON_GPU = {
    # The sums of an evaluation. The number of samples is one of them and divides the others: 0 would raise.
    "00_single_gpu/train.py": 1.0,
    "01_data_parallel/train.py": 1.0,
    "02_ddp_raw/train.py": 1.0,
    "03_accelerate/train.py": 1.0,
    "03_accelerate/train_full.py": 1.0,
    "trainer/trainer.py": 0.0,  # The loss, and the norm of the gradients.
    "trainer/progress.py": 0.0,  # The Trainer's loss since the last log.
    "accelerator/loss_scaler.py": 0.0,  # The number of gradients that are not finite.
}
VALUE_ON_CPU = 1  # Of AdamW's count of steps, and of a loader's seed. Only the orders of samplers are real.
TORCH = str(Path(torch.__file__).parent)


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
        if function in ORDERS:
            with unset_fake_temporarily():
                return function(*args, **kwargs)
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
            return VALUE_ON_CPU
        self.note_wait(READ)
        reader = reading_file()
        if reader not in VALUES_ON_GPU:
            raise NotImplementedError(f"in {reader} a value is read from a GPU: give it one in VALUES_ON_GPU")
        return VALUES_ON_GPU[reader]

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


def reading_file() -> str:
    """The file outside of torch whose code calls the operation that this process is in: its folder and its name."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ or frame.f_code.co_filename.startswith(TORCH):
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}"


def memory_of(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())
