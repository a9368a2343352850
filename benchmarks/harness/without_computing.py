"""Tensors with a shape and a storage that nobody writes to: training without computing, in memory that is never used.

Within `without_computing()` an operation's results are allocated and left as they are. Memory that nobody touches costs
address space only, so a step that would need 40 GiB runs in some seconds on a laptop. Unlike torch's fake tensors these
are ordinary tensors of the CPU, so DDP's C++ code, FSDP and optimizers work on them, and `common.memory.track_memory`
counts their storages.

Their numbers mean nothing. Small tensors are computed all the same: optimizers and wrappers read their steps and sizes.
Where a small tensor is drawn at random or follows from a large one, its numbers are made up too. No shape may depend on
them, nor may they be read as a list or a whole number, as the sizes of parts are.
A tensor is small if its storage is. What is cut out of a large one is not computed with: that memory may hold anything,
and an operation that takes it for indices, such as EmbeddingBag's backward, would write wherever they point. A network
whose shapes depend on the numbers of large tensors cannot run this way.
"""

import functools
import logging
import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only

SMALL = 2**14  # bytes of a storage up to which tensors are computed
REFUSED = "can't allocate memory"  # is in what torch raises where the system gives no memory
MAP_NORESERVE = 0x4000  # Linux's; Python has a name for it from 3.13 on
_READ_ONE_NUMBER = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
_HALF = (torch.bfloat16, torch.float16)
_WHOLE = (torch.int32, torch.int64)  # numbers that are mostly read for a shape
# These leave their results as they are, which a small tensor's must not be: what fills it may not be computed.
_UNFILLED = (
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
)


class DependsOnNumbers(RuntimeError):
    """An operation's result has a shape, or a value, that only the numbers of large tensors can tell."""


@contextmanager
def without_computing() -> Iterator[None]:
    """Run operations without computing them.

    Raises:
        DependsOnNumbers: from an operation within the block, such as `nonzero`, that has to know the numbers.
    """
    log = logging.getLogger(FakeTensorMode.__module__)  # it writes a traceback for what is raised, and told, anyway
    was_disabled = log.disabled
    log.disabled = True
    try:
        with _WithoutComputing(), _NoSizesRead():
            yield
    finally:
        log.disabled = was_disabled


class Layout(NamedTuple):
    """All of a tensor but its numbers.

    Attributes:
        argument: of a result that lies in the memory of an argument, that argument's position among the tensors.
        offset: of its first element there, counted from the argument's first one.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    argument: int | None = None
    offset: int = 0


_known: dict[tuple, Any] = {}  # layouts of results, by operation and arguments


class _WithoutComputing(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.shapes = FakeTensorMode()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: to keep torch's compiler out of each call would take longer than the call."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves = flat((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if _changes_metadata_only(func):
            results = func(*args, **kwargs)
            if any(map(_is_made_up, tensors)):
                _mark(results)
            return results
        if func in _READ_ONE_NUMBER or func.namespace == "profiler":
            return func(*args, **kwargs)
        if func.namespace == "c10d":  # a group that is not there still copies what it is given
            if not all(map(_is_small, tensors)):
                args, kwargs = tree_map_only(Tensor, _without_elements, (args, kwargs))
            return func(*args, **kwargs)
        if tensors and func not in _UNFILLED and all(map(_can_be_computed, tensors)):
            return _computed(func, args, kwargs, tensors)
        if _writes_to_arguments(func):
            written = [_argument(func, result.alias_info, args, kwargs) for result in func._schema.returns]
            _mark(written)
            if len(written) < 2:
                return written[0] if written else None
            return tuple(written)
        layouts = self._layouts_of_results(func, args, kwargs, leaves)
        results = tree_map(partial(_allocated, tensors), layouts, is_leaf=lambda leaf: isinstance(leaf, Layout))
        if tensors or torch.Tag.nondeterministic_seeded in func.tags:
            _mark(results)
        return results

    def _layouts_of_results(self, func, args, kwargs, leaves) -> Any:
        key = (func, *map(_key, leaves))
        try:
            if key in _known:
                return _known[key]
        except TypeError:  # an argument that cannot be a part of a key
            return self._inferred(func, args, kwargs, leaves)
        layouts = _known[key] = self._inferred(func, args, kwargs, leaves)
        return layouts

    def _inferred(self, func, args, kwargs, leaves) -> Any:
        if not any(isinstance(leaf, Tensor) for leaf in leaves):  # it makes a tensor, which needs no fake ones
            return tree_map_only(Tensor, partial(_layout, {}), func(*args, **{**kwargs, "device": "meta"}))
        fakes: list[Tensor] = []

        def fake(tensor: Tensor) -> Tensor:
            fakes.append(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype))
            return fakes[-1]

        try:
            with self.shapes:
                args, kwargs = tree_map_only(Tensor, fake, (args, kwargs))
                results = func(*args, **kwargs)
        except DynamicOutputShapeException as error:
            raise DependsOnNumbers(f"the result of {func} has a shape that depends on numbers") from error
        except DataDependentOutputException as error:
            raise DependsOnNumbers(f"{func} reads numbers") from error
        # Not every operation says in its schema that it returns an argument.
        storages = {_storage(argument): position for position, argument in enumerate(fakes)}
        return tree_map_only(Tensor, partial(_layout, storages), results)


def _computed(func, args, kwargs, tensors: list[Tensor]) -> Any:
    is_made_up = any(map(_is_made_up, tensors))
    shape_depends_on_numbers = torch.Tag.dynamic_output_shape in func.tags
    if func is torch.ops.aten.index.Tensor:  # only a mask chooses as many elements as it is true
        shape_depends_on_numbers = any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors[1:])
    if is_made_up and shape_depends_on_numbers:
        raise DependsOnNumbers(f"the result of {func} has a shape that depends on numbers")
    results = func(*args, **kwargs)
    if is_made_up:
        _mark(results)
    return results


class _NoSizesRead(TorchFunctionMode):
    """Refuses to read a list, or a whole number, that is made up: it may be the size of a part.

    The dispatch mode sees no list being made, and does not know who reads a number: DDP reads some too.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.tolist or (func is Tensor.item and args[0].dtype in _WHOLE):
            _refuse_made_up(args[0])
        return func(*args, **(kwargs or {}))


def _refuse_made_up(tensor: Tensor) -> None:
    if _is_made_up(tensor) or not _is_small(tensor):
        raise DependsOnNumbers("a list or a whole number is read that only computing could tell")


def flat(nested: Any) -> list:
    """The leaves of an operation's arguments or results; each list comes after its length."""
    if isinstance(nested, dict):
        nested = [*nested, *nested.values()]
    if not isinstance(nested, list | tuple):
        return [nested]
    leaves = [len(nested)]
    for value in nested:
        leaves += flat(value)
    return leaves


def _key(leaf: Any) -> tuple:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype
    return type(leaf), leaf  # 1, 1.0 and True are equal, and make other results


def _mark(results: Any) -> None:
    """Mark small tensors whose numbers are random, or follow from large ones."""
    for leaf in flat(results):
        if isinstance(leaf, Tensor) and _is_small(leaf):
            leaf.is_made_up = True


def _is_made_up(tensor: Tensor) -> bool:
    return getattr(tensor, "is_made_up", False)


def _is_small(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() <= SMALL


def _without_elements(tensor: Tensor) -> Tensor:
    return tensor[:0]


def _can_be_computed(tensor: Tensor) -> bool:
    """True for a small tensor of a precision that every CPU computes with. No size or step is kept in another one."""
    return tensor.dtype not in _HALF and _is_small(tensor)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _layout(storages: dict[int, int], tensor: Tensor) -> Layout:
    """The Layout of `tensor`. `storages`: positions of the arguments, by their storages."""
    layout = Layout(tensor.shape, tensor.stride(), tensor.dtype)
    if _storage(tensor) not in storages:
        return layout
    return layout._replace(argument=storages[_storage(tensor)], offset=tensor.storage_offset())


@functools.cache
def _changes_metadata_only(func: torch._ops.OpOverload) -> bool:
    """True where the results are views of the arguments, or the arguments with another shape or storage."""
    if torch.Tag.inplace_view in func.tags:
        return True
    results = func._schema.returns
    views = [result for result in results if result.alias_info is not None and not result.alias_info.is_write]
    return len(views) == len(results) > 0


@functools.cache
def _writes_to_arguments(func: torch._ops.OpOverload) -> bool:
    """True where all that the operation returns, perhaps nothing, are arguments that it has written to."""
    aliases = [result.alias_info for result in func._schema.returns]
    return all(alias is not None and alias.is_write for alias in aliases)


def _argument(func: torch._ops.OpOverload, alias: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The argument that a result with this alias is."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.before_set == alias.before_set:
            return args[position] if position < len(args) else kwargs[argument.name]
    raise AssertionError(f"{func} returns {alias}, which is none of its arguments")


def _allocated(arguments: list[Tensor], leaf: Any) -> Any:
    """A tensor with the layout `leaf`: in an argument's memory, or new. Small ones are 0: they may be read."""
    if not isinstance(leaf, Layout):
        return leaf
    if leaf.argument is not None:
        argument = arguments[leaf.argument]
        return argument.as_strided(leaf.shape, leaf.stride, argument.storage_offset() + leaf.offset)
    try:
        tensor = torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype)
    except RuntimeError as error:
        if REFUSED not in str(error) or sys.platform != "linux":
            raise
        return _in_address_space(leaf)
    return tensor.zero_() if _is_small(tensor) else tensor


def _in_address_space(layout: Layout) -> Tensor:
    """A tensor in address space for which the system promises no memory.

    Linux refuses a tensor that is larger than its memory, although nobody will write to it. It gives the address space
    to whoever says so. Such a storage cannot be resized.

    Raises:
        MemoryError: where there is not so much address space.
    """
    last = sum((size - 1) * stride for size, stride in zip(layout.shape, layout.stride, strict=True))
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    try:
        room = mmap.mmap(-1, (last + 1) * layout.dtype.itemsize, flags=kind)
    except (OSError, OverflowError) as error:
        raise MemoryError(REFUSED) from error
    return torch.frombuffer(room, dtype=layout.dtype).as_strided(layout.shape, layout.stride)
