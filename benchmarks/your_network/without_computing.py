"""Run a training step without computing it, to count its memory and operations in seconds on a laptop.

Within `without_computing()` the results of an operation have the right shape, and are not filled. Linux gives no memory
to pages that nobody writes to, so a step that would need 40 GiB needs almost none. Unlike torch's fake tensors these
are ordinary CPU tensors: DDP's C++ code, FSDP and optimizers work on them, and `common.memory.track_memory` counts
their storages. An operation is treated in the first of four ways that applies to it:

1. It is *refused* if the shape of its result depends on numbers, which are not there: `large[large > 0]`.
2. It *sends nothing* if it is a collective of large tensors: `dist.all_reduce(large)` is run with empty tensors.
3. It *runs* if it makes a view (`large.t()`), reads numbers, which are arbitrary (`large[0, 0].item()`), or marks a
   profile; also if all its tensors are small (`torch.tensor(3.0) + 1`), because optimizers read step counts and sizes.
4. Else its results are *allocated*: `torch.randn(8192, 8192)` takes 256 MiB of addresses, and hardly any memory. So
   does `large @ large.t()`. Small results are 0, because they may be read: `large.sum()`.
"""

import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from benchmarks.your_network.fused_attention import fused_attention
from common.memory.operations import tensors_in

SMALL_BYTES = 2**14
OUT_OF_MEMORY = "can't allocate memory"  # The message of torch's RuntimeError has these words.
MAP_NORESERVE = 0x4000  # Linux's; Python has a name for it from 3.13 on
_READ_NUMBERS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
# A small `empty_like` is not run, because the operation that would fill it may be skipped. It gets zeros like other
# small results.
_UNFILLED = (
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
)


@contextmanager
def without_computing() -> Iterator[None]:
    """Run operations without computing them. One that has to know the numbers, as `nonzero`, raises a RuntimeError."""
    with _WithoutComputing(), fused_attention():
        yield


class _WithoutComputing(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        # By operation and arguments, because to find the shapes of results takes longer than all the rest.
        self._results: dict[tuple, Any] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """True would make torch disable its compiler around each call, which takes longer than the call."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = tensors_in((args, kwargs))
        are_small = all(map(_is_small, tensors))
        # 1. It is refused.
        if _shape_depends_on_numbers(func, tensors):
            raise RuntimeError(f"the result of {func} has a shape that depends on numbers")
        # 2. It sends nothing: the fake process group would copy what is sent.
        if func.namespace == "c10d" and not are_small:
            args, kwargs = tree_map_only(Tensor, lambda tensor: tensor[:0], (args, kwargs))
            return func(*args, **kwargs)
        # 3. It runs.
        computes_small = tensors and are_small and func not in _UNFILLED
        marks_profile = func.namespace == "profiler"
        if computes_small or makes_view(func) or func in _READ_NUMBERS or marks_profile:
            return func(*args, **kwargs)
        # 4. Its results are allocated.
        key = (func, _key(args), _key(kwargs))
        if key not in self._results:
            self._results[key] = _run_on_meta(func, args, kwargs, tensors)
        return tree_map_only(_Result, lambda result: result.allocate(tensors), self._results[key])


@dataclass(frozen=True)
class _Result:
    """A tensor that an operation returns, found on torch's device "meta", whose tensors have shapes and no numbers.

    Attributes:
        meta: the tensor there.
        argument: where it is in the memory of an argument, the number of that one among the tensors; else None.
    """

    meta: Tensor
    argument: int | None

    def allocate(self, tensors: list[Tensor]) -> Tensor:
        """The result of an operation with these tensors as arguments."""
        if self.argument is None:
            return _empty_like(self.meta)
        argument = tensors[self.argument]
        offset = argument.storage_offset() + self.meta.storage_offset()
        return argument.as_strided(self.meta.shape, self.meta.stride(), offset)


def _key(argument: Any) -> tuple:
    """Equal for arguments that give results of the same shapes, strides and dtypes."""
    if isinstance(argument, Tensor):
        return argument.shape, argument.stride(), argument.dtype
    if isinstance(argument, dict):
        return _key([*argument.items()])
    if isinstance(argument, list | tuple):
        return tuple(map(_key, argument))
    return type(argument), argument  # 1, 1.0 and True are equal, but give results of different dtypes


def _is_small(tensor: Tensor) -> bool:
    """True if its storage is small. A slice of a large tensor holds arbitrary numbers.

    If they were computed with as indices, they would point to arbitrary addresses.
    """
    return tensor.untyped_storage().nbytes() <= SMALL_BYTES


def _shape_depends_on_numbers(func: torch._ops.OpOverload, tensors: list[Tensor]) -> bool:
    if func is torch.ops.aten.index.Tensor:  # indices give a fixed shape, a mask does not
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors[1:])
    return torch.Tag.dynamic_output_shape in func.tags


def makes_view(func: torch._ops.OpOverload) -> bool:
    """True for views, and for operations that give an argument another shape or storage."""
    return func.is_view or torch.Tag.inplace_view in func.tags


def _run_on_meta(func: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
    """What the operation returns, with a _Result in the place of each tensor."""
    metas = [torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="meta") for each in tensors]
    in_order = iter(metas)
    meta_args, meta_kwargs = tree_map_only(Tensor, lambda _: next(in_order), (args, kwargs))
    if not tensors or kwargs.get("device") is not None:  # Without tensors it is a factory, such as torch.randn.
        meta_kwargs["device"] = "meta"
    results = func(*meta_args, **meta_kwargs)
    # Storages are compared, because not every operation says in its schema that it returns an argument.
    arguments = {meta.untyped_storage()._cdata: number for number, meta in enumerate(metas)}
    return tree_map_only(Tensor, lambda meta: _Result(meta, arguments.get(meta.untyped_storage()._cdata)), results)


def _empty_like(meta: Tensor) -> Tensor:
    try:
        tensor = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype)
    except RuntimeError as error:
        if sys.platform != "linux" or OUT_OF_MEMORY not in str(error):
            raise
        # Linux refuses to allocate a tensor larger than the machine's memory, even if nobody writes to it. With
        # MAP_NORESERVE it gives the addresses alone. Such a storage cannot be resized.
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        room = mmap.mmap(-1, meta.untyped_storage().nbytes(), flags=kind)
        return torch.frombuffer(room, dtype=meta.dtype).as_strided(meta.shape, meta.stride())
    return tensor.zero_() if _is_small(tensor) else tensor
