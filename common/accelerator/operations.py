"""Collectives on nested structures (gather, reduce, broadcast, pad), and moving and converting the tensors in them.

First comes what works on this process alone, and then the collectives.

A collective takes its structure apart, lets `exchange.py` compare what the ranks send and fetch the bytes of all of
them, and puts the structure together again. With `gather({"y": y, "x": x})` on two ranks these steps follow each other:

    structure = SortedLeaves(data)   its leaves are ("['x']", x) and ("['y']", y), in this order on both ranks
    describe("gather", …)            ["gather", "['x'] [3] torch.int64", "['y'] [3, 2] torch.float32"]
    exchange_each(…)                 the bytes of x and those of y, of both ranks; an error if the descriptions differ
    from_bytes(…)                    x of the shape [6], and y of the shape [6, 2]
    structure.replace_sorted(…)      {"y": y, "x": x}

On nccl nothing is compared: `exchange.py` says why, and what happens there if the ranks differ.
"""

import pickle
from collections.abc import Callable, Mapping
from functools import update_wrapper, wraps
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from common.nested import NamedLeaf, SortedLeaves, honor_type, map_nested
from common.process_group import all_gather_object

from .exchange import as_bytes, broadcast_bytes, compare, describe, exchange, exchange_each, from_bytes, is_dense
from .state import DistributedType, PartialState


def is_torch_tensor(tensor: Any) -> bool:
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
    tensor: Any, device: torch.device | str | int, non_blocking: bool = False, skip_keys: str | list[str] | None = None
) -> Any:
    """Nested `tensor` with everything that has a `to` on `device`; values under `skip_keys` stay where they are."""

    def move(leaf: Any) -> Any:
        if not _has_to(leaf):
            return leaf
        try:
            return leaf.to(device, non_blocking=non_blocking)
        except TypeError:  # The class is the script's own, and its `to` takes only the device.
            return leaf.to(device)

    if isinstance(skip_keys, str):
        skip_keys = [skip_keys]
    return map_nested(move, tensor, is_leaf=_has_to, skip_keys=skip_keys or ())


def _has_to(data: Any) -> bool:
    return hasattr(data, "to")


def listify(data: Any) -> Any:
    """Nested `data` with numbers, or lists of numbers, in place of each tensor."""
    return recursively_apply(torch.Tensor.tolist, data)


def find_batch_size(data: Any) -> int:
    """Rows of the first tensor in nested `data`; a ValueError if it is empty, a TypeError for another first leaf."""
    if isinstance(data, (Mapping, tuple, list)):
        if not data:
            raise ValueError(f"Cannot find the batch size from empty {type(data)}.")
        values = data.values() if isinstance(data, Mapping) else data
        return find_batch_size(next(iter(values)))
    if not isinstance(data, torch.Tensor):
        raise TypeError(f"Can only find the batch size of tensors but got {type(data)}.")
    return data.shape[0]


def concatenate(data: Any, dim: int = 0) -> Any:
    """Nested tensors of one structure, joined along `dim`; a TypeError for something else, unless it is alone."""
    first = data[0]
    if isinstance(first, (tuple, list)):
        return honor_type(first, (concatenate(entries, dim) for entries in zip(*data, strict=True)))
    if isinstance(first, Mapping):
        mapping: Any = type(first)
        return mapping({key: concatenate([each[key] for each in data], dim) for key in first})
    if isinstance(first, torch.Tensor):
        return torch.cat(data, dim=dim)
    if len(data) > 1:
        raise TypeError(f"Can only concatenate tensors but got {type(first)}")
    return first


def convert_to_fp32(tensor: Any) -> Any:
    """Nested `tensor` with float16 and bfloat16 tensors as float32."""
    return recursively_apply(lambda tensor: tensor.float(), tensor, test_type=_is_half_precision)


def _is_half_precision(leaf: Any) -> bool:
    return getattr(leaf, "dtype", None) in (torch.float16, torch.bfloat16)


class ConvertOutputsToFp32:
    """`model_forward`, with float16 and bfloat16 tensors in its result as float32."""

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.model_forward(*args, **kwargs)
        return convert_to_fp32(output)


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """A plain function around a ConvertOutputsToFp32: unlike the object, it can be bound to a model as its method.

    Programs find the object in `__wrapped__`, as in the original, and put its `model_forward` back.
    """
    converted = ConvertOutputsToFp32(model_forward)

    @wraps(converted)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return converted(*args, **kwargs)

    return forward


def gather(tensor: Any) -> Any:
    """Nested tensors of equal shape from all processes, concatenated in rank order: (n, …) becomes (n·world size, …).

    Scalars become vectors of one entry per rank. In a single process the input itself is returned.

    Raises:
        TypeError: on several processes, for leaves that are no tensors.
        DistributedOperationException: on all processes, if keys, shapes or dtypes differ between them; not on nccl.
    """
    if PartialState().distributed_type == DistributedType.NO:
        return tensor
    structure = SortedLeaves(tensor)
    return structure.replace_sorted(gather_tensors("gather", structure.named))


def gather_tensors(collective: str, named: list[NamedLeaf]) -> list[torch.Tensor]:
    """The tensors of all processes, joined, for a collective of this name."""
    contents = [as_bytes(leaf) for _, leaf in named if is_dense(leaf)]
    # The ranks compare their leaves in this exchange. The types are checked after it, so that all ranks raise, or none.
    rows_of_contents = exchange_each(describe(collective, named), contents)
    tensors = _require_dense_tensors(named)
    return [from_bytes(rows, tensor) for rows, tensor in zip(rows_of_contents, tensors, strict=True)]


def _require_tensors(named: list[NamedLeaf]) -> list[torch.Tensor]:
    for name, leaf in named:
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(f"Unsupported types ({type(leaf)}) in a collective: {name or 'the input'} is no tensor")
    return [leaf for _, leaf in named]


def _require_dense_tensors(named: list[NamedLeaf]) -> list[torch.Tensor]:
    tensors = _require_tensors(named)
    if not all(map(is_dense, tensors)):
        raise TypeError("sparse, nested and quantized tensors can be neither gathered nor broadcast")
    return tensors


def gather_object(object: Any) -> Any:  # the original's name of the parameter
    """The lists of all processes, joined in rank order; in a single process the input itself.

    Raises:
        RuntimeError: on all processes, if one cannot pickle its list; not on nccl.
    """
    if PartialState().distributed_type == DistributedType.NO:
        return object
    return list(chain.from_iterable(gather_objects(object, ["gather_object"])))


def gather_objects(own: Any, description: list[str]) -> list[Any]:
    """The objects of all processes in rank order; an error on all of them if they have other `description`s."""
    if PartialState().backend == "nccl":
        return all_gather_object(own)
    try:
        pickled = _pickle(own)
    except CannotPickleError as error:
        pickled = pickle.dumps(error)
    content = torch.frombuffer(bytearray(pickled), dtype=torch.uint8)
    # `pickle.loads` stops where the object ends, so it does not mind the zeros that fill up a row.
    return [_unpickle(row.numpy().tobytes()) for row in exchange(description, content)]


class CannotPickleError(RuntimeError):
    """The error of a rank whose object cannot be pickled. It is sent instead, because the other ranks wait for it."""


def _pickle(own: Any) -> bytes:
    try:
        return pickle.dumps(own)
    except Exception as cause:  # The object's own code may raise anything.
        rank = PartialState().process_index
        raise CannotPickleError(f"rank {rank} cannot pickle what it has to send: {cause}") from cause


def _unpickle(content: bytes) -> Any:
    """The object that a rank has sent. Raises the CannotPickleError that it has sent in its place."""
    received = pickle.loads(content)
    if isinstance(received, CannotPickleError):
        raise received
    return received


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Fill nested tensors, in place, with those of rank `from_process`, and return them.

    Raises:
        TypeError, DistributedOperationException: as `gather`.
    """
    if PartialState().distributed_type == DistributedType.NO:
        return tensor
    structure = SortedLeaves(tensor)
    compare(describe(f"broadcast from {from_process}", structure.named))
    tensors = _require_dense_tensors(structure.named)
    for each in tensors:
        own = each.detach()
        # A tensor with gaps in memory, such as a column, is sent and received as a copy without them.
        content = own.resolve_conj().resolve_neg().contiguous()
        dist.broadcast(as_bytes(content), from_process)
        if content is not own:
            own.copy_(content)
    return structure.replace_sorted(tensors)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Fill `object_list`, in place, with that of rank `from_process`, and return it.

    Raises:
        RuntimeError: on all processes, if rank `from_process` cannot pickle its list.
    """
    state = PartialState()
    if state.distributed_type == DistributedType.NO:
        return object_list
    if state.process_index != from_process:
        object_list[:] = _unpickle(broadcast_bytes(None, from_process))
        return object_list
    try:
        pickled = _pickle(object_list)
    except CannotPickleError as error:
        broadcast_bytes(pickle.dumps(error), from_process)
        raise
    broadcast_bytes(pickled, from_process)
    return object_list


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Nested tensors combined over all processes by `reduction`: "mean", "sum", "max", or "none" for no operation.

    In a single process copies of the tensors are returned.

    Args:
        scale: has an effect on TPUs only, as in the original.

    Raises:
        ValueError: for any other reduction.
        TypeError, DistributedOperationException: as `gather`.
        RuntimeError: for a dtype that the backend cannot add up, such as int16.
    """
    if reduction not in ("mean", "sum", "max", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum', 'max' or 'none', not {reduction!r}")
    if PartialState().distributed_type == DistributedType.NO:
        return recursively_apply(torch.clone, tensor, error_on_other_type=True)
    structure = SortedLeaves(tensor)
    compare(describe(f"reduce by {reduction}", structure.named))
    return structure.replace_sorted(_reduce_one(each, reduction) for each in _require_tensors(structure.named))


def _reduce_one(tensor: torch.Tensor, reduction: str) -> torch.Tensor:
    result = tensor.clone().resolve_conj().resolve_neg()
    if reduction == "none":
        return result
    if reduction == "mean" and not (result.is_floating_point() or result.is_complex()):
        result = result.long()  # the sum of small integers may need more bits than they have
    operation = dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM
    # Each rank has its tensor in this layout, because the ranks add up what is at the same place in memory.
    content = result.contiguous() if is_dense(result) else result
    dist.all_reduce(content, operation)
    if content is not result:
        result.copy_(content)
    if reduction == "mean":
        return result / PartialState().num_processes
    return result


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """Nested tensors, filled up with `pad_index` along `dim` to the longest over all processes.

    Tensors that have no such dimension stay as they are. With `pad_first` the filling comes before the content.

    Raises:
        TypeError: for leaves that are no tensors.
        DistributedOperationException: on all processes, if the keys differ between them; not on nccl.
    """
    structure = SortedLeaves(tensor)
    if PartialState().distributed_type == DistributedType.NO:
        return structure.replace_sorted(_require_tensors(structure.named))
    lengths = torch.zeros(len(structure.named), dtype=torch.int64, device="cpu")
    for place, (_, leaf) in enumerate(structure.named):
        if _has_dimension(leaf, dim):
            lengths[place] = leaf.shape[dim]
    description = describe("pad_across_processes", structure.named, _tensor_or_class)  # Shapes and dtypes may differ.
    lengths_of_ranks = from_bytes(exchange(description, as_bytes(lengths)), lengths)
    longest = lengths_of_ranks.view(PartialState().num_processes, len(lengths)).amax(0).tolist()
    padded = []
    for each, length in zip(_require_tensors(structure.named), longest, strict=True):
        padded.append(_pad_one(each, dim, length, pad_index, pad_first))
    return structure.replace_sorted(padded)


def _tensor_or_class(leaf: Any) -> str:
    return "tensor" if isinstance(leaf, torch.Tensor) else type(leaf).__name__


def _has_dimension(leaf: Any, dim: int) -> bool:
    return isinstance(leaf, torch.Tensor) and not leaf.is_nested and -leaf.ndim <= dim < leaf.ndim


def _pad_one(tensor: torch.Tensor, dim: int, length: int, pad_index: float, pad_first: bool) -> torch.Tensor:
    if not _has_dimension(tensor, dim) or length == tensor.shape[dim]:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = length - tensor.shape[dim]
    padding = tensor.new_full(shape, pad_index)
    parts = [padding, tensor] if pad_first else [tensor, padding]
    return torch.cat(parts, dim=dim)
