"""Tensors with a shape and a storage that nobody writes to: training without computing, in memory that is never used.

Within `hollow()` an operation's results are allocated and left as they are. Memory that nobody touches costs address
space only, so a step that would need 40 GiB runs in some seconds on a laptop. Unlike torch's fake tensors these are
ordinary tensors of the CPU, so DDP's C++ code, FSDP and optimizers work on them, and `common.memory.accounting` counts
their storages.

Their numbers mean nothing. Small tensors are computed all the same: optimizers and wrappers read their steps and sizes.
Where a small tensor is drawn at random or follows from a large one, its numbers are made up too. No shape may depend on
them, nor may they be read as a list or a whole number, as the sizes of parts are.
A tensor is small if its storage is. What is cut out of a large one is not computed with: that memory may hold anything,
and an operation that takes it for indices, such as EmbeddingBag's backward, would write wherever they point. A network
whose shapes depend on the numbers of large tensors cannot run this way.
"""

import logging
import mmap
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_iter, tree_map, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

SMALL = 2**14  # bytes of a storage up to which tensors are computed
REFUSED = "can't allocate memory"  # is in what torch raises where the system gives no memory
MAP_NORESERVE = 0x4000  # Linux's; Python has a name for it from 3.13 on
# What these do to a tensor is not its numbers: they send it, or say where it begins in a profile.
_NOT_ARITHMETIC = ("c10d", "profiler")
_READ_ONE_NUMBER = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
_WHOLE = (torch.int32, torch.int64)  # numbers that are mostly read for a shape
# These leave their results as they are, which a small tensor's must not be: what fills it may not be computed.
_UNFILLED = (
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
)

Answer = TypeVar("Answer")


class DependsOnNumbers(RuntimeError):
    """An operation's result has a shape, or a value, that only the numbers of large tensors can tell."""


@contextmanager
def hollow() -> Iterator[None]:
    """Run operations without computing them.

    Raises:
        DependsOnNumbers: from an operation within the block, such as `nonzero`, that has to know the numbers.
    """
    log = logging.getLogger(FakeTensorMode.__module__)  # it writes a traceback for what is raised, and told, anyway
    was_disabled = log.disabled
    log.disabled = True
    try:
        mode = _Hollow()
        with mode, _Sizes(mode):
            yield
    finally:
        log.disabled = was_disabled


def hollow_if_possible(question: Callable[[], Answer]) -> Answer:
    """The answer of a function that is run without computing, or, where it depends on numbers, with computing."""
    try:
        with hollow():
            return question()
    except DependsOnNumbers:
        return question()


class Layout(NamedTuple):
    """All of a tensor but its numbers.

    Attributes:
        argument: of a result that lies in the memory of an argument, that argument's position among the leaves.
        offset: of its first element there, counted from the argument's first one.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    argument: int | None = None
    offset: int = 0


class _Hollow(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.shapes = FakeTensorMode()
        self.known: dict[tuple, Any] = {}  # layouts of results, by operation and layouts of arguments
        self.made_up = WeakTensorKeyDictionary()  # small tensors with random numbers, or that follow from large ones

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        if _changes_metadata_only(func):
            results = func(*args, **kwargs)
            if any(tensor in self.made_up for tensor in tensors):
                self._mark(results)
            return results
        if func in _READ_ONE_NUMBER or func.namespace in _NOT_ARITHMETIC:
            return func(*args, **kwargs)
        if tensors and func not in _UNFILLED and all(map(_is_small, tensors)):
            return self._computed(func, args, kwargs, tensors)
        if _writes_to_arguments(func):
            written = [_argument(func, result.alias_info, args, kwargs) for result in func._schema.returns]
            self._mark(written)
            return _as_returned(written)
        leaves, structure = tree_flatten((args, kwargs))
        layouts = self._layouts_of_results(func, leaves, structure)
        results = tree_map(partial(_allocated, leaves), layouts, is_leaf=_is_layout)
        if tensors or torch.Tag.nondeterministic_seeded in func.tags:
            self._mark(results)
        return results

    def _computed(self, func, args, kwargs, tensors: list[Tensor]) -> Any:
        is_made_up = any(tensor in self.made_up for tensor in tensors)
        if is_made_up and _shape_depends_on_numbers(func, tensors):
            raise DependsOnNumbers(f"the result of {func} has a shape that depends on numbers")
        results = func(*args, **kwargs)
        if is_made_up:
            self._mark(results)
        return results

    def _mark(self, results: Any) -> None:
        for leaf in tree_iter(results):
            if isinstance(leaf, Tensor) and _is_small(leaf):
                self.made_up[leaf] = None

    def _layouts_of_results(self, func, leaves, structure) -> Any:
        layouts = tuple(map(_layout, leaves))
        key = (func, structure, layouts)
        try:
            if key in self.known:
                return self.known[key]
        except TypeError:  # an argument that cannot be a part of a key
            return self._inferred(func, layouts, structure)
        result = self.known[key] = self._inferred(func, layouts, structure)
        return result

    def _inferred(self, func, layouts, structure) -> Any:
        try:
            with self.shapes:
                fakes = [_without_numbers(layout) for layout in layouts]
                args, kwargs = tree_unflatten(fakes, structure)
                results = func(*args, **kwargs)
        except DynamicOutputShapeException as error:
            raise DependsOnNumbers(f"the result of {func} has a shape that depends on numbers") from error
        except DataDependentOutputException as error:
            raise DependsOnNumbers(f"{func} reads numbers") from error
        # Not every operation says in its schema that it returns an argument.
        storages = {_storage(fake): position for position, fake in enumerate(fakes) if isinstance(fake, Tensor)}
        return tree_map(partial(_layout, storages=storages), results)


class _Sizes(TorchFunctionMode):
    """A mode that refuses to read a list, or a whole number, that is made up: it may be the size of a part.

    A dispatch mode sees no list being made, and does not know who reads a number: DDP reads some too.
    """

    def __init__(self, mode: _Hollow) -> None:
        super().__init__()
        self.mode = mode

    def __torch_function__(self, func, types, args=(), kwargs=None):
        reads = func is Tensor.tolist or (func is Tensor.item and args[0].dtype in _WHOLE)
        if reads and (args[0] in self.mode.made_up or not _is_small(args[0])):
            raise DependsOnNumbers(f"{func.__name__} reads numbers")
        return func(*args, **(kwargs or {}))


def _is_small(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() <= SMALL


def _shape_depends_on_numbers(func: torch._ops.OpOverload, tensors: list[Tensor]) -> bool:
    if func is torch.ops.aten.index.Tensor:  # only a mask chooses as many elements as it is true
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors[1:])
    return torch.Tag.dynamic_output_shape in func.tags


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _layout(leaf: Any, storages: dict[int, int] | None = None) -> Any:
    """The Layout of `leaf`, if that is a tensor. `storages`: positions of the arguments, by their storages."""
    if not isinstance(leaf, Tensor):
        return leaf
    layout = Layout(leaf.shape, leaf.stride(), leaf.dtype)
    if storages is None or _storage(leaf) not in storages:
        return layout
    return layout._replace(argument=storages[_storage(leaf)], offset=leaf.storage_offset())


def _is_layout(leaf: Any) -> bool:
    return isinstance(leaf, Layout)


def _changes_metadata_only(func: torch._ops.OpOverload) -> bool:
    """True where the results are views of the arguments, or the arguments with another shape or storage."""
    if torch.Tag.inplace_view in func.tags:
        return True
    results = func._schema.returns
    return bool(results) and all(_is_view(result.alias_info) for result in results)


def _is_view(alias: Any) -> bool:
    return alias is not None and not alias.is_write


def _writes_to_arguments(func: torch._ops.OpOverload) -> bool:
    """True where all that the operation returns, perhaps nothing, are arguments that it has written to."""
    return all(result.alias_info is not None and result.alias_info.is_write for result in func._schema.returns)


def _argument(func: torch._ops.OpOverload, alias: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The argument that a result with this alias is."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.before_set == alias.before_set:
            return args[position] if position < len(args) else kwargs[argument.name]
    raise AssertionError(f"{func} returns {alias}, which is none of its arguments")


def _as_returned(results: list) -> Any:
    if not results:
        return None
    return results[0] if len(results) == 1 else tuple(results)


def _without_numbers(leaf: Any) -> Any:
    """A fake tensor with the layout `leaf`, if that is one. To be called within a FakeTensorMode."""
    if not isinstance(leaf, Layout):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype)


def _allocated(leaves: list, leaf: Any) -> Any:
    """A tensor with the layout `leaf`: of an argument among `leaves`, or new. Small ones are 0: they may be read."""
    if not isinstance(leaf, Layout):
        return leaf
    if leaf.argument is not None:
        argument = leaves[leaf.argument]
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
