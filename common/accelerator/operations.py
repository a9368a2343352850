"""Collectives on nested structures (gather, reduce, broadcast, pad), and moving and converting the tensors in them.

A collective takes its structure apart, lets `exchange.py` compare what the ranks send and fetch the bytes of all of
them, and puts the structure together again. With `gather({"y": y, "x": x})` on two ranks these steps follow each other:

    structure = SortedLeaves(data)   its leaves are ("['x']", x) and ("['y']", y), in this order on both ranks
    describe("gather", …)            ["gather", "['x'] [3] torch.int64", "['y'] [3, 2] torch.float32"]
    exchange_each(…)                 the bytes of x and those of y, of both ranks; an error if the descriptions differ
    from_bytes(…)                    x of the shape [6], and y of the shape [6, 2]
    structure.replace(…)             {"y": y, "x": x}

On nccl nothing is compared: `exchange.py` says why, and what happens there if the ranks differ.
"""

import pickle
from collections.abc import Callable
from functools import update_wrapper, wraps
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from common.nested import NamedLeaf, SortedLeaves, is_namedtuple, leaves, map_nested
from common.process_group import all_gather_object

from .exchange import as_bytes, broadcast_bytes, compare, describe, exchange, exchange_each, from_bytes, is_dense
from .state import DistributedType, PartialState


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
    return structure.replace(_gather_tensors("gather", structure.named))


def _gather_tensors(collective: str, named: list[NamedLeaf]) -> list[torch.Tensor]:
    """The tensors of all processes, joined, for a collective of this name."""
    contents = [as_bytes(leaf) for _, leaf in named if is_dense(leaf)]
    # The ranks compare their leaves in this exchange. The types are checked after it, so that all ranks raise, or none.
    rows_of_contents = exchange_each(describe(collective, named), contents)
    tensors = _require_dense_tensors(named)
    return [from_bytes(rows, tensor) for rows, tensor in zip(rows_of_contents, tensors, strict=True)]


def _require_tensors(named: list[NamedLeaf]) -> list[torch.Tensor]:
    """The leaves, which must be tensors."""
    for name, leaf in named:
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(f"Unsupported types ({type(leaf)}) in a collective: {name or 'the input'} is no tensor")
    return [leaf for _, leaf in named]


def _require_dense_tensors(named: list[NamedLeaf]) -> list[torch.Tensor]:
    """The leaves, which must be tensors that can be sent as bytes."""
    tensors = _require_tensors(named)
    if not all(map(is_dense, tensors)):
        raise TypeError("sparse, nested and quantized tensors can be neither gathered nor broadcast")
    return tensors


def gather_object(object: Any) -> Any:
    """The lists of all processes, joined in rank order; in a single process the input itself.

    The parameter has the original's name.

    Raises:
        RuntimeError: on all processes, if one cannot pickle its list; not on nccl.
    """
    if PartialState().distributed_type == DistributedType.NO:
        return object
    return list(chain.from_iterable(_gather_objects(object, ["gather_object"])))


def _gather_objects(own: Any, description: list[str]) -> list[Any]:
    """The objects of all processes in rank order, if `description` is the same on all of them."""
    if PartialState().backend == "nccl":
        return all_gather_object(own)
    pickled, _ = _pickle(own)
    content = torch.frombuffer(bytearray(pickled), dtype=torch.uint8)
    # `pickle.loads` stops where the object ends, so it does not mind the zeros that fill up a row.
    return [_unpickle(row.numpy().tobytes()) for row in exchange(description, content)]


def _pickle(own: Any) -> tuple[bytes, RuntimeError | None]:
    """The pickle of `own`, and None. If it cannot be pickled, that of an error for `_unpickle`, and the error."""
    try:
        return pickle.dumps(own), None
    except Exception as cause:  # The object's own code may raise anything, and the other ranks wait.
        rank = PartialState().process_index
        error = RuntimeError(f"rank {rank} cannot pickle what it has to send: {cause}")
        return pickle.dumps(error), error


def _unpickle(content: bytes) -> Any:
    """What was given to `_pickle`. Raises the error that was sent in its place, if there was one."""
    received = pickle.loads(content)
    if isinstance(received, RuntimeError):
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
    return structure.replace(tensors)


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
    pickled, error = _pickle(object_list)
    broadcast_bytes(pickled, from_process)
    if error is not None:
        raise error
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
    return structure.replace(_reduce_one(each, reduction) for each in _require_tensors(structure.named))


def _reduce_one(tensor: torch.Tensor, reduction: str) -> torch.Tensor:
    result = tensor.clone().resolve_conj().resolve_neg()
    if reduction == "none":
        return result
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
        return structure.replace(_require_tensors(structure.named))
    lengths = torch.zeros(len(structure.named), dtype=torch.int64)
    # Unlike `describe`, this leaves out the shapes, which may differ, and the dtypes.
    description = ["pad_across_processes"]
    for place, (name, leaf) in enumerate(structure.named):
        kind = "tensor" if is_torch_tensor(leaf) else type(leaf).__name__
        description.append(f"{name} {kind}")
        if _has_dimension(leaf, dim):
            lengths[place] = leaf.shape[dim]
    lengths_of_ranks = from_bytes(exchange(description, as_bytes(lengths)), lengths)
    longest = lengths_of_ranks.view(PartialState().num_processes, len(lengths)).amax(0).tolist()
    padded = []
    for each, length in zip(_require_tensors(structure.named), longest, strict=True):
        padded.append(_pad_one(each, dim, length, pad_index, pad_first))
    return structure.replace(padded)


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


def gather_for_metrics(data: Any, loader: Any = None, use_gather_object: bool = False) -> Any:
    """The results of all processes for the batch that `loader` yielded, without those of repeated samples.

    In a single process nothing is joined. On several, in rank order:

        tensor                                    its rows; a scalar, such as a loss, is one row
        list or tuple without tensors, array      a list of its entries
        other list or tuple, namedtuple, mapping  the same structure, where each value is gathered by its own kind
        any other object, such as text or None    a list with one entry per process

    In the last step tensors and lists are cut to the number of samples, a gathered loss too. On two processes:

        on rank 0                    on rank 1                    the result on both
        tensor([0, 1])               tensor([2, 3])               tensor([0, 1, 2, 3])
        ["a", "b"]                   ["c", "d"]                   ["a", "b", "c", "d"]
        [tensor([0]), tensor([1])]   [tensor([2]), tensor([3])]   [tensor([0, 2]), tensor([1, 3])]
        {"loss": 0.5}                {"loss": 0.7}                {"loss": [0.5, 0.7]}

    Each call is a collective, and gives every process the results of all. A metric that is a sum over samples (a loss,
    correct predictions) needs less: each process adds up its own samples, and one `reduce` at the end adds these sums.

    Args:
        data: the same structure on all processes.
        loader: the prepared loader that is being iterated over; None outside of a loop.
        use_gather_object: take `data` as one list of objects, whatever it holds.

    Raises:
        RuntimeError: if some process has no batch in this step, so that it cannot take part, or as `gather_object`.
        DistributedOperationException: as `gather`; in an uneven step only the numbers of rows may differ.
    """
    short_step = None if loader is None else loader.short_step
    is_uneven = False
    num_real = None
    if short_step is not None:
        if short_step.num_ranks_present < PartialState().num_processes:
            present = f"only ranks 0 to {short_step.num_ranks_present - 1} have a batch in this step"
            raise RuntimeError(f"{present}: evaluate with even_batches=True")
        is_uneven = not short_step.is_even
        # Samples are repeated in the last step, and where one loader worker's share of a stream ends. A batch sampler
        # may yield short batches before. They repeat nothing, so nothing is cut there.
        if loader.end_of_dataloader or short_step.has_repeated:
            num_real = short_step.num_real_all_ranks

    if use_gather_object:
        return _without_repeated(_gather_entries(data), num_real)
    structure = SortedLeaves(data, is_list_of_entries)
    gathered = _gather_values(structure.named, is_uneven)
    return structure.replace(_without_repeated(value, num_real) for value in gathered)


def is_list_of_entries(data: Any) -> bool:
    """True for a list or tuple that is no structure: a plain one, without tensors."""
    if not isinstance(data, (list, tuple)) or is_namedtuple(data):
        return False
    return not any(isinstance(leaf, torch.Tensor) for leaf in leaves(data))


def _without_repeated(value: Any, num_real: int | None) -> Any:
    """The part of a joined value that belongs to real samples, which come first. None says that all are real."""
    if num_real is None:
        return value
    has_rows = isinstance(value, (list, tuple)) or (isinstance(value, torch.Tensor) and value.ndim > 0)
    return value[:num_real] if has_rows else value


def _gather_entries(data: Any) -> Any:
    """The entries of `data` of all processes, in one list; in a single process `data` itself."""
    if PartialState().distributed_type == DistributedType.NO:
        return data
    if isinstance(data, torch.Tensor):
        # A list of its rows comes back, as in the original. A view would be pickled with the whole tensor.
        data = [row.clone() for row in torch.atleast_1d(data.detach()).cpu()]
    return gather_object(_as_joinable(data))


def _gather_values(named: list[NamedLeaf], is_uneven: bool) -> list[Any]:
    """The values in a structure, each gathered by its kind. In a single process they stay as they are.

    Tensors alone travel as bytes. With other values among them, or with other numbers of rows on some process
    (`is_uneven`), all values travel pickled.
    """
    values = [value for _, value in named]
    if PartialState().distributed_type == DistributedType.NO:
        return values
    if not is_uneven and all(map(is_torch_tensor, values)):
        return _gather_tensors("gather_for_metrics", named)
    description = ["gather_for_metrics"]
    for name, value in named:
        content = "objects"
        if isinstance(value, torch.Tensor):
            shape = value.shape[1:] if is_uneven else value.shape
            content = f"rows of {list(shape)} {value.dtype}"
        description.append(f"{name} {content}")
    values_of_ranks = _gather_objects([_as_joinable(value) for value in values], description)
    return [_join(values_of_name) for values_of_name in zip(*values_of_ranks, strict=True)]


def _as_joinable(value: Any) -> Any:
    """`value` as a tensor that can be pickled, or as something to iterate over: what `_join` takes of each process."""
    if isinstance(value, torch.Tensor):
        # Otherwise a tensor would come out of its pickle on the GPU of the sender, and a view with the whole tensor.
        return torch.atleast_1d(value.detach()).to("cpu", copy=True)
    try:
        iter(value)
    except TypeError:  # It is a single object.
        return [value]
    return [value] if isinstance(value, (str, bytes)) else value


def _join(values_of_ranks: tuple[Any, ...]) -> Any:
    if isinstance(values_of_ranks[0], torch.Tensor):
        return torch.cat(values_of_ranks).to(PartialState().device)
    return list(chain.from_iterable(values_of_ranks))


class RemoteError(RuntimeError):
    """Raised on a process that met no error itself, because another process met one; it quotes that error."""


def run_on_all_ranks(action: Callable[[], Any], runs_here: bool = True) -> Any:
    """Run `action` where `runs_here` is true, and return its result; if one process raises, all of them raise.

    A collective: all processes must call it. None is left waiting for one that failed.

    Raises:
        RemoteError: on the other processes.
    """
    result = None
    error: BaseException | None = None
    try:
        if runs_here:
            result = action()
    except (Exception, SystemExit) as failure:
        error = failure
    rank = PartialState().process_index
    errors = gather_object([] if error is None else [f"rank {rank}: {type(error).__name__}: {error}"])
    if error is not None:
        raise error
    if errors:
        raise RemoteError(errors[0])
    return result


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
