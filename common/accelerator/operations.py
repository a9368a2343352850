"""Tensors and objects across processes: gather, reduce, broadcast, pad; and through nested structures."""

import operator
import pickle
import warnings
import zlib
from collections.abc import Callable
from functools import update_wrapper, wraps
from itertools import chain
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from common.process_group import all_gather_object

from ..nested import leaves, map_nested, zip_nested
from .sampler import PartialStep
from .state import DistributedType, PartialState


class CannotPadNestedTensorWarning(UserWarning):
    """A nested tensor was left as it is, since nobody can say how to pad it."""


# Nested structures


def is_torch_tensor(tensor: Any) -> bool:
    """True for a tensor."""
    return isinstance(tensor, torch.Tensor)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """`func(leaf, *args, **kwargs)` for every leaf of nested lists, tuples and mappings that passes `test_type`.

    Raises:
        TypeError: with `error_on_other_type`, for a leaf that does not pass; otherwise it is kept as it is.
    """

    def apply(leaf: Any) -> Any:
        if test_type(leaf):
            return func(leaf, *args, **kwargs)
        if error_on_other_type:
            raise TypeError(
                f"Unsupported types ({type(leaf)}) passed to `{func.__name__}`. Only nested list/tuple/dicts of "
                f"objects that are valid for `{test_type.__name__}` should be passed."
            )
        return leaf

    return map_nested(apply, data)


def send_to_device(
    tensor: Any,
    device: torch.device | str | int,
    non_blocking: bool = False,
    skip_keys: str | list[str] | None = None,
) -> Any:
    """Nested `tensor` with everything that has a `to` on `device`; values under `skip_keys` stay where they are."""

    def has_to(data: Any) -> bool:
        return hasattr(data, "to")

    def move(leaf: Any) -> Any:
        if not has_to(leaf):
            return leaf
        try:
            return leaf.to(device, non_blocking=non_blocking)
        except TypeError:  # a `to` of somebody's own that takes only the device
            return leaf.to(device)

    if isinstance(skip_keys, str):
        skip_keys = [skip_keys]
    return map_nested(move, tensor, is_leaf=has_to, skip_keys=skip_keys or ())


def listify(data: Any) -> Any:
    """Nested `data` with numbers, or lists of numbers, in place of each tensor."""

    def to_list(tensor: torch.Tensor) -> Any:
        return tensor.detach().cpu().tolist()

    return recursively_apply(to_list, data)


def find_device(data: Any) -> torch.device | None:
    """The device of the first tensor in nested `data`; None if there is none."""
    for leaf in leaves(data):
        if isinstance(leaf, torch.Tensor):
            return leaf.device
    return None


def concatenate(data: list[Any], dim: int = 0) -> Any:
    """One nested structure whose tensors are the concatenations along `dim` of those in the structures of `data`.

    Raises:
        TypeError: for leaves that are no tensors, unless there is only one structure.
    """

    def join(first: Any, *others: Any) -> Any:
        if isinstance(first, torch.Tensor):
            return torch.cat((first, *others), dim=dim)
        if others:
            raise TypeError(f"Can only concatenate tensors but got {type(first)}")
        return first

    return zip_nested(join, *data)


def slice_tensors(
    data: Any, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """Nested `data` with `tensor_slice` of every tensor in it; everything else stays as it is."""
    return recursively_apply(operator.getitem, data, tensor_slice)


def holds_tensors(data: Any) -> bool:
    """True if there is a tensor somewhere in nested `data`."""
    return any(isinstance(leaf, torch.Tensor) for leaf in leaves(data))


# What is said where a collective fails


def _named_in_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, a collective, whose errors name it and the rank."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            state = PartialState()
            where = f"rank {state.process_index} of {state.num_processes}"
            error.add_note(f"`{function.__name__}` failed on {where}: it is a collective, did all processes call it?")
            raise

    return run


# Collectives


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, in its memory. gloo and nccl each lack some dtypes; bytes are moved by both."""
    # Not `view(-1)`, which would keep the stride of a column of a single row: it counts as contiguous too.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


@_named_in_errors
def gather(tensor: Any) -> Any:
    """Nested tensors of equal shape from all processes, concatenated in rank order: (n, …) becomes (n·world size, …).

    One collective, whatever the number of tensors. Scalars become vectors of one entry per rank. In a single process
    the input itself is returned.

    Raises:
        TypeError: for leaves that are no tensors.
        RuntimeError: on a CPU, if the shapes or dtypes of several tensors differ between the processes.
    """
    state = PartialState()
    if state.distributed_type == DistributedType.NO:
        return tensor
    tensors = list(leaves(tensor))
    if len(tensors) > 1 and _fit_in_one_message(tensors):
        gathered = iter(_gather_together(tensors, state.num_processes))
        return map_nested(lambda _: next(gathered), tensor)
    return recursively_apply(_gather_one, tensor, error_on_other_type=True)


def _gather_one(tensor: torch.Tensor) -> torch.Tensor:
    state = PartialState()
    tensor = tensor.detach().contiguous()
    if tensor.ndim == 0:
        tensor = tensor[None]
    content = _as_bytes(tensor)
    everyone = [torch.empty_like(content) for _ in range(state.num_processes)]
    dist.all_gather(everyone, content)
    rows = tensor.shape[0] * state.num_processes
    return torch.cat(everyone).view(tensor.dtype).view(rows, *tensor.shape[1:])


def _fit_in_one_message(leaves: list[Any]) -> bool:
    """True for tensors of one device that have nothing but elements: no subclasses, no sparse or quantized ones."""
    for leaf in leaves:
        if type(leaf) not in (torch.Tensor, torch.nn.Parameter) or leaf.device != leaves[0].device:
            return False
        if leaf.layout != torch.strided or leaf.is_quantized or leaf.is_nested or leaf.is_conj() or leaf.is_neg():
            return False
    return True


def _gather_together(tensors: list[torch.Tensor], num_processes: int) -> list[torch.Tensor]:
    """Tensors of equal shape from all processes in one collective, which moves their bytes.

    On a CPU a checksum of shapes and dtypes comes with them. On a GPU nobody waits for the kernels, so nobody could
    look at it.
    """
    tensors = [each if each.ndim else each[None] for each in tensors]
    device = tensors[0].device
    pieces = [_as_bytes(each.detach().contiguous()) for each in tensors]
    has_checksum = device.type == "cpu"
    if has_checksum:
        description = ", ".join(f"{list(each.shape)} {each.dtype}" for each in tensors)
        checksum = torch.tensor([zlib.crc32(description.encode())])  # Python's own `hash` differs between processes
        pieces.append(checksum.view(torch.uint8))
    message = torch.cat(pieces)
    everyone = torch.empty(num_processes, message.numel(), dtype=torch.uint8, device=device)
    dist.all_gather(list(everyone.unbind()), message)
    sizes = [piece.numel() for piece in pieces]
    bytes_of_ranks = list(everyone.split_with_sizes(sizes, dim=1))
    if has_checksum:
        checksums = bytes_of_ranks.pop()
        if not torch.equal(checksums, checksums[:1].expand_as(checksums)):
            raise RuntimeError(f"the processes gather tensors of different shapes or dtypes, here {description}")
    gathered = []
    for tensor, rows in zip(tensors, bytes_of_ranks, strict=True):
        # The bytes may begin anywhere, but a dtype can be viewed only at a multiple of its size: `cat` copies them.
        content = torch.cat(rows.unbind()).view(tensor.dtype)
        gathered.append(content.view(tensor.shape[0] * num_processes, *tensor.shape[1:]))
    return gathered


@_named_in_errors
def gather_object(object: Any) -> Any:
    """The lists of all processes, joined in rank order; in a single process the input itself."""
    state = PartialState()
    if state.distributed_type == DistributedType.NO:
        return object
    return [item for items in all_gather_object(object) for item in items]


def gather_for_metrics(data: Any, loader: Any = None, use_gather_object: bool = False) -> Any:
    """The results of all processes for the batch that `loader` yielded, without rows for repeated samples.

    Tensors hold one row per sample. Mappings, and lists and tuples with tensors somewhere in them, are structures and
    keep their shape; any other list has one entry per sample. The result is in rank order. What has no row for each
    sample, like a loss, comes as from `gather`; in the last step no more of it than there are samples.
    A number or None becomes, on several processes, a list with one entry per process.

    All tensors of the structure travel in one collective. Everything else is pickled, which takes two more; so are the
    tensors of a last step that is uneven because of `even_batches=False`. So exact results per sample cost a meeting of
    all processes in each step, and memory for the rows of all on every one of them. A metric that is a sum over samples
    (a loss, correct predictions) needs neither: each process sums up its own, and one `reduce` after the loop adds the
    sums.

    Args:
        data: the same structure on all processes.
        loader: the prepared loader that is being iterated over; None outside of a loop.
        use_gather_object: take `data` as a list with one entry per sample, whatever it holds.

    Raises:
        RuntimeError: if some process has no batch in this step, so that it cannot take part; if the shapes or dtypes of
            tensors differ between the processes, in more than their rows.
    """
    partial = None if loader is None else loader.partial_step
    is_last = loader is not None and loader.end_of_dataloader
    state = PartialState()
    if partial is not None and partial.num_ranks_present < state.num_processes:
        present = f"only ranks 0 to {partial.num_ranks_present - 1} have a batch in this step"
        raise RuntimeError(f"{present}: evaluate with even_batches=True")
    is_column = _is_anything if use_gather_object else is_list_of_entries
    if state.distributed_type == DistributedType.NO:
        return map_nested(lambda column: _own_real_rows(column, partial, is_last), data, is_leaf=is_column)
    have_equal_shapes = not use_gather_object and (partial is None or partial.is_filled)
    results = []
    for column in _gather_columns(list(leaves(data, is_column)), partial, have_equal_shapes):
        if partial is not None and (column.is_batch or is_last):
            results.append(column.rows[: partial.num_real_all_ranks])
        else:
            results.append(column.rows)
    in_order = iter(results)
    return map_nested(lambda _: next(in_order), data, is_leaf=is_column)


def is_list_of_entries(data: Any) -> bool:
    """True for a list or tuple without tensors: a column with one entry per sample, and no structure."""
    return isinstance(data, (list, tuple)) and not holds_tensors(data)


def _is_anything(data: Any) -> bool:
    return True


def _own_real_rows(column: Any, partial: PartialStep | None, is_last: bool) -> Any:
    """The results of a single process, of which none are gathered."""
    has_rows = _count_rows(column) is not None
    if partial is not None and (_is_batch(column, partial) or (is_last and has_rows)):
        return column[: partial.num_real_all_ranks]
    return column


def _is_batch(column: Any, partial: PartialStep | None) -> bool:
    """True for a column that has as many rows as this process's batch in `partial`; any number, if none is known."""
    rows = _count_rows(column)
    return partial is not None and rows is not None and partial.rows in (None, rows)


def _count_rows(data: Any) -> int | None:
    """Rows of a tensor, entries of a list or letters of a text; None for what has none."""
    if isinstance(data, torch.Tensor):
        return len(data) if data.ndim else None
    return len(data) if isinstance(data, (list, tuple, str)) else None


class _Gathered(NamedTuple):
    """A column of all processes, joined; is it a batch of this step on each of them?"""

    rows: Any
    is_batch: bool


def _gather_columns(columns: list[Any], partial: PartialStep | None, have_equal_shapes: bool) -> list[_Gathered]:
    """Tensors in one collective, if they `have_equal_shapes` on all processes, and everything else pickled."""
    # Both by their places among the columns.
    tensors: dict[int, torch.Tensor] = {}
    others: dict[int, Any] = {}
    for place, column in enumerate(columns):
        if isinstance(column, torch.Tensor) and have_equal_shapes:
            tensors[place] = column
        else:
            others[place] = column
    gathered: dict[int, _Gathered] = {}
    if tensors:
        rows_of_all = gather(list(tensors.values()))
        for (place, own), rows in zip(tensors.items(), rows_of_all, strict=True):
            gathered[place] = _Gathered(rows, _is_batch(own, partial))
    if others:
        pickled = _gather_pickled(list(others.values()), partial)
        gathered.update(zip(others, pickled, strict=True))
    return [gathered[place] for place in range(len(columns))]


class _Part(NamedTuple):
    """A process's part of a column: is it a batch of this step, and how many rows of such a batch are real?"""

    content: Any
    is_batch: bool
    num_real: int | None


def _gather_pickled(columns: list[Any], partial: PartialStep | None) -> list[_Gathered]:
    """Columns of any kind and any number of rows from all processes."""
    num_real = None if partial is None else partial.num_real
    own = []
    for column in columns:
        # The lists of several processes are joined, so what is one entry goes into a list of its own.
        content = [column] if column is None or isinstance(column, (int, float)) else column
        is_batch = _is_batch(content, partial)
        if isinstance(column, torch.Tensor):
            # A tensor of a GPU would come out of its pickle on the GPU of the sender.
            content = torch.atleast_1d(column.detach()).cpu()
        own.append(_Part(content, is_batch, num_real))
    gathered = []
    for parts in zip(*gather_object([own]), strict=True):
        is_batch = all(part.is_batch for part in parts)
        contents = [part.content[: part.num_real] if is_batch else part.content for part in parts]
        if isinstance(contents[0], torch.Tensor):
            rows: Any = torch.cat(contents).to(PartialState().device)
        else:
            rows = list(chain.from_iterable(contents))
        gathered.append(_Gathered(rows, is_batch))
    return gathered


@_named_in_errors
def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Fill nested tensors, in place, with those of rank `from_process`, and return them.

    Raises:
        TypeError: for leaves that are no tensors.
    """
    if PartialState().distributed_type == DistributedType.NO:
        return tensor

    def broadcast_one(tensor: torch.Tensor) -> torch.Tensor:
        content = tensor.detach().contiguous()
        dist.broadcast(_as_bytes(content), from_process)
        if not tensor.is_contiguous():  # `content` is a copy
            tensor.detach().copy_(content)
        return tensor

    return recursively_apply(broadcast_one, tensor, error_on_other_type=True)


@_named_in_errors
def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Fill `object_list`, in place, with that of rank `from_process`, and return it; the lengths must be equal."""
    if PartialState().distributed_type != DistributedType.NO:
        dist.broadcast_object_list(object_list, src=from_process)
    return object_list


@_named_in_errors
def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Nested tensors combined over all processes by `reduction`: "mean", "sum", "max", or "none" for no operation.

    In a single process copies of the tensors are returned.

    Args:
        scale: has an effect on TPUs only, as in the original.

    Raises:
        ValueError: for any other reduction.
        TypeError: for leaves that are no tensors.
        RuntimeError: for a dtype that the backend cannot add up, such as int16.
    """
    if reduction not in ("mean", "sum", "max", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum', 'max' or 'none', not {reduction!r}")
    return recursively_apply(_reduce_one, tensor, reduction, error_on_other_type=True)


def _reduce_one(tensor: torch.Tensor, reduction: str) -> torch.Tensor:
    state = PartialState()
    result = tensor.clone()
    if state.distributed_type == DistributedType.NO or reduction == "none":
        return result
    operation = dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM
    dist.all_reduce(result, operation)
    if reduction == "mean":
        return result / state.num_processes
    return result


@_named_in_errors
def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """Nested tensors, filled up with `pad_index` along `dim` to the longest over all processes.

    Tensors that have no such dimension stay as they are, and so do nested tensors, with a warning. With `pad_first` the
    filling comes before the content. The number of dimensions must be the same on all processes.

    Raises:
        TypeError: for leaves that are no tensors.
    """
    return recursively_apply(_pad_one, tensor, dim, pad_index, pad_first, error_on_other_type=True)


def _pad_one(tensor: torch.Tensor, dim: int, pad_index: float, pad_first: bool) -> torch.Tensor:
    if tensor.is_nested:
        warnings.warn(
            "Cannot pad nested tensors without more information. Leaving unprocessed.",
            CannotPadNestedTensorWarning,
            stacklevel=2,
        )
        return tensor
    if not -tensor.ndim <= dim < tensor.ndim:
        return tensor
    mine = torch.tensor([tensor.shape[dim]], device=tensor.device)
    longest = int(gather(mine).max())
    if longest == tensor.shape[dim]:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = longest - tensor.shape[dim]
    padding = tensor.new_zeros(shape) + pad_index
    parts = [padding, tensor] if pad_first else [tensor, padding]
    return torch.cat(parts, dim=dim)


# Precision


def convert_to_fp32(tensor: Any) -> Any:
    """Nested `tensor` with float16 and bfloat16 tensors as float32."""

    def to_float(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float()

    def is_half_precision(leaf: Any) -> bool:
        return getattr(leaf, "dtype", None) in (torch.float16, torch.bfloat16)

    return recursively_apply(to_float, tensor, test_type=is_half_precision)


class ConvertOutputsToFp32:
    """`model_forward`, with float16 and bfloat16 tensors in its result as float32.

    Raises:
        pickle.PicklingError: when it is pickled, for it belongs to a prepared model: unwrap that one first.
    """

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.model_forward(*args, **kwargs)
        return convert_to_fp32(output)

    def __getstate__(self) -> NoReturn:
        raise pickle.PicklingError(
            "Cannot pickle a prepared model with automatic mixed precision: unwrap it first with "
            "`Accelerator.unwrap_model(model, keep_fp32_wrapper=False)`."
        )


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """`model_forward`, with float16 and bfloat16 tensors in its result as float32; `__wrapped__` leads back to it."""
    converted = ConvertOutputsToFp32(model_forward)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return converted(*args, **kwargs)

    vars(forward)["__wrapped__"] = converted
    return forward
