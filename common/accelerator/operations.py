"""Tensors and objects across processes: gather, reduce, broadcast, pad; and through nested structures."""

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from .state import PartialState


class DistributedOperationException(Exception):
    """A collective was called with different arguments, in a different order, or not at all on some rank."""


def _collective(function: Callable) -> Callable:
    """`function`, whose errors name it. Under ACCELERATE_DEBUG_MODE torch compares each collective over the ranks."""

    @wraps(function)
    def checked(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            state = PartialState()
            who = f"rank {state.process_index} of {state.num_processes}"
            if not state.debug:
                error.add_note(f"`{function.__name__}` failed on {who}: it is a collective, did all processes call it?")
                raise
            raise DistributedOperationException(f"`{function.__name__}` failed on {who}: {error}") from error

    return checked


def honor_type(obj: Any, generator: Iterable) -> Any:
    """The items of `generator` in a list, tuple or namedtuple of the type of `obj`."""
    return type(obj)(*generator) if hasattr(obj, "_fields") else type(obj)(generator)


def recursively_apply(func, data, *args, test_type=torch.is_tensor, error_on_other_type=False, **kwargs) -> Any:
    """`func(leaf, *args, **kwargs)` for every leaf of nested lists, tuples and mappings that passes `test_type`.

    Raises:
        TypeError: with `error_on_other_type`, for a leaf that does not pass; otherwise it is kept as it is.
    """

    def apply(item: Any) -> Any:
        if isinstance(item, (tuple, list)):
            return honor_type(item, (apply(part) for part in item))
        if isinstance(item, Mapping):
            return type(item)({key: apply(value) for key, value in item.items()})
        if test_type(item):
            return func(item, *args, **kwargs)
        if error_on_other_type:
            raise TypeError(f"`{func.__name__}` takes nested lists, tuples and dicts of tensors, not {type(item)}")
        return item

    return apply(data)


def send_to_device(tensor: Any, device: Any, non_blocking: bool = False, skip_keys: str | list[str] = ()) -> Any:
    """Nested `tensor` with everything that has a `to` on `device`; values under `skip_keys` stay where they are."""
    if isinstance(tensor, torch.Tensor):
        return tensor if tensor.device == device else tensor.to(device, non_blocking=non_blocking)
    if isinstance(tensor, (tuple, list)):
        return honor_type(tensor, [send_to_device(item, device, non_blocking, skip_keys) for item in tensor])
    if hasattr(tensor, "to"):
        return tensor.to(device)
    if isinstance(tensor, Mapping):
        stay = (skip_keys,) if isinstance(skip_keys, str) else skip_keys or ()
        moved = {k: v if k in stay else send_to_device(v, device, non_blocking, stay) for k, v in tensor.items()}
        return type(tensor)(moved)
    return tensor


def find_batch_size(data: Any) -> int:
    """The first dimension of the first tensor in nested `data`.

    Raises:
        ValueError: if a list, tuple or mapping on the way is empty.
        TypeError: if what is found first is no tensor.
    """
    while isinstance(data, (tuple, list, Mapping)):
        if not data:
            raise ValueError(f"Cannot find the batch size from empty {type(data)}.")
        data = next(iter(data.values())) if isinstance(data, Mapping) else data[0]
    if not isinstance(data, torch.Tensor):
        raise TypeError(f"Can only find the batch size of tensors but got {type(data)}.")
    return data.shape[0]


@_collective
def gather(tensor: Any) -> Any:
    """Nested tensors of equal shape from all processes, concatenated in rank order: (n, …) becomes (n·world size, …).

    Scalars become vectors of one entry per rank. In a single process the input itself is returned.
    """
    state = PartialState()
    if not state.use_distributed:
        return tensor

    def gather_one(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach().contiguous().reshape(tensor.shape or (1,))
        everyone = [torch.empty_like(tensor) for _ in range(state.num_processes)]
        dist.all_gather(everyone, tensor)
        return torch.cat(everyone)

    return recursively_apply(gather_one, tensor, error_on_other_type=True)


@_collective
def gather_object(object: Any) -> Any:
    """The lists of all processes, joined in rank order; in a single process the input itself."""
    state = PartialState()
    if not state.use_distributed:
        return object
    everyone = [None] * state.num_processes
    dist.all_gather_object(everyone, object)
    return [item for items in everyone for item in items]


def gather_for_metrics(data: Any, loader: Any = None, use_gather_object: bool = False) -> Any:
    """What all processes computed for the batch that `loader` handed out, without rows for repeated samples.

    Tensors hold one row per sample. Mappings, and lists and tuples with tensors somewhere in them, are structures and
    keep their shape; any other list has one entry per sample. The result is in rank order.

    Args:
        use_gather_object: take `data` as a list with one entry per sample, whatever it holds.

    Raises:
        ValueError: for a scalar, which says nothing about samples, and for fewer rows than real samples.
        TypeError: for an object that is no list.
        RuntimeError: if some process has no batch in this step, so that it cannot take part.
    """
    is_list = isinstance(data, (list, tuple))
    if not use_gather_object and (isinstance(data, Mapping) or (is_list and _holds_tensors(data))):
        parts = data.items() if isinstance(data, Mapping) else enumerate(data)
        gathered = {key: gather_for_metrics(part, loader) for key, part in parts}
        return type(data)(gathered) if isinstance(data, Mapping) else honor_type(data, gathered.values())
    if not is_list and not isinstance(data, torch.Tensor):
        raise TypeError(f"gather_for_metrics takes tensors, or lists with one entry per sample, not {type(data)}")
    if loader is not None and isinstance(data, torch.Tensor) and data.ndim == 0:
        raise ValueError("gather_for_metrics takes a row per sample, not a scalar: use `gather` or reduction='none'")
    irregular = None if loader is None else loader.irregular
    real, present = irregular or (None, PartialState().num_processes)
    if present < PartialState().num_processes:
        raise RuntimeError(f"only ranks 0 to {present - 1} have a batch in this step: evaluate with even_batches=True")
    if real is not None and len(data) < real:
        raise ValueError(f"gather_for_metrics got {len(data)} rows for a batch with {real} samples")
    if use_gather_object or not isinstance(data, torch.Tensor):
        return gather_object(list(data[:real]))
    return gather(data) if irregular is None else _gather_rows(data[:real])


def _holds_tensors(data: Any) -> bool:
    if isinstance(data, (list, tuple, Mapping)):
        return any(_holds_tensors(item) for item in (data.values() if isinstance(data, Mapping) else data))
    return isinstance(data, torch.Tensor)


def _gather_rows(tensor: torch.Tensor) -> torch.Tensor:
    counts = gather(torch.tensor([len(tensor)], device=tensor.device)).tolist()
    everyone = gather(pad_across_processes(tensor)).view(len(counts), max(counts), *tensor.shape[1:])
    return torch.cat([rows[:count] for rows, count in zip(everyone, counts, strict=True)])


@_collective
def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Fill nested tensors, in place, with those of rank `from_process`."""
    if not PartialState().use_distributed:
        return tensor
    return recursively_apply(lambda t: dist.broadcast(t, from_process) or t, tensor, error_on_other_type=True)


@_collective
def broadcast_object_list(object_list: list, from_process: int = 0) -> list:
    """Fill `object_list`, in place, with that of rank `from_process`; its length must agree."""
    if PartialState().use_distributed:
        dist.broadcast_object_list(object_list, src=from_process)
    return object_list


@_collective
def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Nested tensors combined over all processes by `reduction` ("mean", "sum", "max" or "none"), times `scale`.

    Raises:
        ValueError: for any other reduction.
    """
    if reduction not in ("mean", "sum", "max", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum', 'max' or 'none', not {reduction!r}")
    state = PartialState()

    def reduce_one(tensor: torch.Tensor) -> torch.Tensor:
        result = tensor.clone()
        if state.use_distributed and reduction != "none":
            dist.all_reduce(result, dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM)
        if reduction == "mean":
            result = result / state.num_processes
        return result if scale == 1.0 else result * scale

    return recursively_apply(reduce_one, tensor, error_on_other_type=True)


@_collective
def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """Nested tensors, filled up with `pad_index` along `dim` to the longest over all processes.

    Tensors that have no such dimension stay as they are. With `pad_first` the filling comes before the content.
    """
    if not PartialState().use_distributed:
        return tensor

    def pad(tensor: torch.Tensor) -> torch.Tensor:
        if not -tensor.ndim <= dim < tensor.ndim:
            return tensor
        longest = torch.tensor(tensor.shape[dim], device=tensor.device)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        shape = list(tensor.shape)
        shape[dim] = int(longest) - shape[dim]
        padding = tensor.new_full(shape, pad_index)
        return torch.cat([padding, tensor] if pad_first else [tensor, padding], dim=dim)

    return recursively_apply(pad, tensor, error_on_other_type=True)


def concatenate(data: list, dim: int = 0) -> Any:
    """One nested structure whose tensors are the concatenations along `dim` of those in the structures of `data`.

    Raises:
        TypeError: for leaves that are no tensors.
    """
    first = data[0]
    if isinstance(first, (tuple, list)):
        return honor_type(first, (concatenate(parts, dim) for parts in zip(*data, strict=True)))
    if isinstance(first, Mapping):
        return type(first)({key: concatenate([item[key] for item in data], dim) for key in first})
    if isinstance(first, torch.Tensor):
        return torch.cat(tuple(data), dim=dim)
    if len(data) == 1:
        return first
    raise TypeError(f"Can only concatenate tensors but got {type(first)}")


def slice_tensors(data: Any, tensor_slice: slice, process_index=None, num_processes=None) -> Any:
    """The samples in `tensor_slice` of nested `data`, whose structure is what gather_for_metrics takes.

    Raises:
        TypeError: for what has no entry per sample.
    """
    if isinstance(data, Mapping):
        return type(data)({key: slice_tensors(part, tensor_slice) for key, part in data.items()})
    if isinstance(data, (list, tuple)) and _holds_tensors(data):
        return honor_type(data, (slice_tensors(part, tensor_slice) for part in data))
    return data[tensor_slice]


def convert_to_fp32(tensor: Any) -> Any:
    """Nested `tensor` with float16 and bfloat16 tensors as float32."""
    halves = torch.float16, torch.bfloat16
    return recursively_apply(torch.Tensor.float, tensor, test_type=lambda leaf: getattr(leaf, "dtype", None) in halves)


def convert_outputs_to_fp32(model_forward: Callable) -> Callable:
    """`model_forward`, with float16 and bfloat16 tensors in its result as float32."""

    @wraps(model_forward)
    def forward(*args, **kwargs) -> Any:
        return convert_to_fp32(model_forward(*args, **kwargs))

    return forward
