"""Run a training step without computing it, to count its memory and operations in seconds on a laptop.

Within `without_computing()` each operation allocates its results, with the right shape, and does not fill them. Linux
gives no memory to pages that nobody writes to, so a step that would need 40 GiB needs almost none. Unlike torch's fake
tensors these are ordinary CPU tensors: DDP's C++ code, FSDP and optimizers work on them, and
`common.memory.track_memory` counts their storages.

    large = torch.randn(8192, 8192)   allocated: 256 MiB of addresses, and hardly any memory
    large.t()                         runs: a view writes nothing
    product = large @ large.t()       allocated like the result on torch's device "meta", which has no numbers
    product.sum()                     allocated, and 0, because small results may be read
    torch.tensor(3.0) + 1             runs: small tensors are computed, as optimizers read step counts and sizes
    product[0, :2].tolist()           runs, and returns arbitrary numbers
    dist.all_reduce(product)          runs on an empty tensor: nothing has to be sent
    large[large > 0]                  raises DependsOnNumbers: its shape depends on numbers that are not there
"""

import functools
import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

SMALL_BYTES = 2**14
OUT_OF_MEMORY = "can't allocate memory"  # The message of torch's RuntimeError has these words.
MAP_NORESERVE = 0x4000  # Linux's; Python has a name for it from 3.13 on
_ATTEND = F.scaled_dot_product_attention
_READ_NUMBERS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
# These leave their results unfilled. `_allocated` sets small ones to 0: the operation that fills them may be skipped.
_UNFILLED = (
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
)


class DependsOnNumbers(RuntimeError):
    """The shape of an operation's result depends on numbers that were not computed."""


@contextmanager
def without_computing() -> Iterator[None]:
    """Run operations without computing them.

    Raises:
        DependsOnNumbers: from an operation within the block, such as `nonzero`, that has to know the numbers.
    """
    with _WithoutComputing(), fused_attention():
        yield


@contextmanager
def fused_attention() -> Iterator[None]:
    """Attention as a GPU computes it: one fused operator, which keeps no scores for backward.

    The fused operator of a GPU includes dropout. That of a CPU does not: with dropout, a CPU computes attention in some
    ten operators, which keep the scores of each pair of positions. So the dropout is left out here.
    """
    # torch's own modules find the function in its module, also when checkpointing computes them again in backward. A
    # file may have imported it by name: a mode sees that call, but none that is made within another function of torch.
    with patch.object(F, "scaled_dot_product_attention", _attend_without_dropout), _AttentionByName():
        yield


def _attend_without_dropout(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **options) -> Tensor:
    return _ATTEND(query, key, value, attn_mask, 0.0, is_causal, **options)


class _AttentionByName(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function is _ATTEND:
            function = _attend_without_dropout
        return function(*args, **(kwargs or {}))


class _Layout(NamedTuple):
    """The results of an operation on torch's device "meta", whose tensors have shapes and no numbers.

    Attributes:
        argument_of: address of a storage on "meta" → index of the argument that owns it.
    """

    results: Any
    argument_of: dict[int, int]


class _WithoutComputing(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        # By operation and arguments. Addresses are compared only within one layout, whose results stay alive.
        self._layouts: dict[tuple, _Layout] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """True would make torch disable its compiler around each call, which takes longer than the call."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves = _leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        are_small = all(map(_is_small, tensors))
        # An operation that makes a view, or reads a number, writes nothing.
        if _changes_metadata_only(func) or func in _READ_NUMBERS or func.namespace == "profiler":
            return func(*args, **kwargs)
        # The fake process group would copy what is sent, so it gets empty tensors in place of large ones.
        if func.namespace == "c10d":
            if not are_small:
                args, kwargs = tree_map_only(Tensor, lambda tensor: tensor[:0], (args, kwargs))
            return func(*args, **kwargs)
        if _shape_depends_on_numbers(func, tensors):
            raise DependsOnNumbers(f"the result of {func} has a shape that depends on numbers")
        if tensors and are_small and func not in _UNFILLED:
            return func(*args, **kwargs)
        key = (func, *map(_key, leaves))
        if key not in self._layouts:
            self._layouts[key] = _layout_of(func, args, kwargs)
        layout = self._layouts[key]
        return tree_map_only(Tensor, partial(_allocated, tensors, layout.argument_of), layout.results)


def _leaves(nested: Any) -> list:
    """The leaves of an operation's arguments, each list after its length, so that f([1], 2) and f(1, [2]) differ."""
    if isinstance(nested, dict):
        nested = [*nested, *nested.values()]
    if not isinstance(nested, list | tuple):
        return [nested]
    leaves = [len(nested)]
    for value in nested:
        leaves += _leaves(value)
    return leaves


def _key(leaf: Any) -> tuple:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype
    return type(leaf), leaf  # 1, 1.0 and True are equal, but give results of different dtypes


def _is_small(tensor: Tensor) -> bool:
    """True if its storage is small. A slice of a large tensor holds arbitrary numbers.

    If they were computed with as indices, they would point to arbitrary addresses.
    """
    return tensor.untyped_storage().nbytes() <= SMALL_BYTES


def _shape_depends_on_numbers(func: torch._ops.OpOverload, tensors: list[Tensor]) -> bool:
    if func is torch.ops.aten.index.Tensor:  # indices give a fixed shape, a mask does not
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors[1:])
    return torch.Tag.dynamic_output_shape in func.tags


@functools.cache
def _changes_metadata_only(func: torch._ops.OpOverload) -> bool:
    """True if the results are views of the arguments, or the arguments with another shape or storage."""
    if torch.Tag.inplace_view in func.tags:
        return True
    results = func._schema.returns
    views = [result for result in results if result.alias_info is not None and not result.alias_info.is_write]
    return len(views) == len(results) > 0


def _layout_of(func: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> _Layout:
    metas: list[Tensor] = []

    def meta(tensor: Tensor) -> Tensor:
        metas.append(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"))
        return metas[-1]

    args, kwargs = tree_map_only(Tensor, meta, (args, kwargs))
    if not metas or kwargs.get("device") is not None:  # without tensors it is a factory, such as torch.randn
        kwargs["device"] = "meta"
    results = func(*args, **kwargs)
    return _Layout(results, {_storage(argument): position for position, argument in enumerate(metas)})


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _allocated(arguments: list[Tensor], argument_of: dict[int, int], meta: Tensor) -> Tensor:
    """The tensor for a result on "meta": in an argument's memory, if they share a storage on "meta", else a new one.

    Storages are compared, because not every operation says in its schema that it returns an argument. Small new tensors
    are 0, because they may be read.
    """
    if _storage(meta) in argument_of:
        argument = arguments[argument_of[_storage(meta)]]
        return argument.as_strided(meta.shape, meta.stride(), argument.storage_offset() + meta.storage_offset())
    try:
        tensor = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype)
    except RuntimeError as error:
        if OUT_OF_MEMORY not in str(error) or sys.platform != "linux":
            raise
        return _in_address_space(meta)
    return tensor.zero_() if _is_small(tensor) else tensor


def _in_address_space(meta: Tensor) -> Tensor:
    """A tensor like `meta` in address space that no memory is reserved for.

    Linux refuses to allocate a tensor larger than the machine's memory, even if nobody writes to it. With MAP_NORESERVE
    it gives the addresses alone. Such a storage cannot be resized.
    """
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    room = mmap.mmap(-1, meta.untyped_storage().nbytes(), flags=kind)
    return torch.frombuffer(room, dtype=meta.dtype).as_strided(meta.shape, meta.stride())
