"""`gather_for_metrics`: the results of all processes for one batch, where each real sample counts once."""

from functools import partial
from itertools import chain
from typing import Any

import torch

from common.nested import NamedLeaf, SortedLeaves

from .exchange import describe, shape_and_dtype
from .operations import gather_objects, gather_tensors, is_torch_tensor
from .rows import is_list_of_entries
from .state import DistributedType, PartialState


def gather_for_metrics(data: Any, loader: Any = None, use_gather_object: bool = False) -> Any:
    """The results of all processes for the batch that `loader` yielded, without those of repeated samples.

    In a single process nothing is joined. On two, in rank order:

        kind of value               on rank 0           on rank 1           the result on both
        tensor                      tensor([0, 1])      tensor([2, 3])      tensor([0, 1, 2, 3])
        scalar tensor, as a loss    tensor(0.5)         tensor(0.7)         tensor([0.5, 0.7])
        list of no tensors, array   ["a", "b"]          ["c", "d"]          ["a", "b", "c", "d"]
        any other object            "a"                 None                ["a", None]
        structure, of each value    {"x": tensor([0])}  {"x": tensor([1])}  {"x": tensor([0, 1])}

    A structure is a mapping, a namedtuple, or a list or tuple with tensors. In the last step tensors and lists are cut
    to the number of samples, a gathered loss too. In a single process nothing is cut beside a scalar tensor.

    Each call is a collective, and gives every process the results of all. A metric that is a sum over samples (a loss,
    correct predictions) needs less: each process adds up its own samples, and one `reduce` at the end adds these sums.

    Args:
        data: the same structure on all processes.
        loader: the prepared loader that is being iterated over; None outside of a loop.
        use_gather_object: take `data` as one list of objects, whatever it holds; the rows of a tensor are its entries.

    Raises:
        RuntimeError: if some process has no batch in this step, so that it cannot take part, or as `gather_object`.
        DistributedOperationException: as `gather`; in an uneven step only the numbers of rows may differ.
    """
    short_step = None if loader is None else loader.short_step
    if short_step is not None and len(short_step.rows) < PartialState().num_processes:
        present = f"only ranks 0 to {len(short_step.rows) - 1} have a batch in this step"
        raise RuntimeError(f"{present}: evaluate with even_batches=True")
    if use_gather_object:
        return _first_rows(_gather_entries(data), _rows_to_keep(loader))
    structure = SortedLeaves(data, is_list_of_entries)
    same_rows = short_step is None or len(set(short_step.rows)) == 1  # on all processes
    gathered = _gather_values(structure.named, same_rows)
    # In a single process a scalar stays one. As in the original, nothing beside it is cut.
    has_scalar = any(isinstance(value, torch.Tensor) and value.ndim == 0 for value in gathered)
    num_rows = None if has_scalar else _rows_to_keep(loader)
    return structure.replace_sorted(_first_rows(value, num_rows) for value in gathered)


def _rows_to_keep(loader: Any) -> int | None:
    """The number of real samples in this step, if results are cut to it; else None.

    Samples are repeated in the last step, and where one loader worker's share of a stream ends. A batch sampler may
    yield short batches before, or batches of any size. They repeat nothing, so nothing is cut there.
    """
    if loader is None or loader.short_step is None:
        return None
    num_real = loader.short_step.num_real_all_ranks
    repeats_samples = num_real < sum(loader.short_step.rows)
    is_last = loader.end_of_dataloader and loader.total_batch_size is not None
    return num_real if repeats_samples or is_last else None


def _first_rows(value: Any, number: int | None) -> Any:
    """The first rows of a joined value. Without a number it stays whole, and so does what has no rows."""
    if number is None:
        return value
    has_rows = isinstance(value, (list, tuple)) or (isinstance(value, torch.Tensor) and value.ndim > 0)
    return value[:number] if has_rows else value


def _gather_entries(data: Any) -> Any:
    """The entries of `data` of all processes, in one list; in a single process `data` itself."""
    if PartialState().distributed_type == DistributedType.NO:
        return data
    if isinstance(data, torch.Tensor):
        # A list of its rows comes back, as in the original. A view would be pickled with the whole tensor.
        data = [row.clone() for row in torch.atleast_1d(data.detach()).cpu()]
    return _gather_pickled([NamedLeaf("", data)], same_rows=True)[0]


def _gather_values(named: list[NamedLeaf], same_rows: bool) -> list[Any]:
    """The values of all processes, each joined to one; in a single process the values themselves.

    Tensors alone travel as bytes. With other values among them, or with other numbers of rows on some process, all
    values travel pickled.
    """
    values = [value for _, value in named]
    if PartialState().distributed_type == DistributedType.NO:
        return values
    if same_rows and all(map(is_torch_tensor, values)):
        return gather_tensors("gather_for_metrics", named)
    return _gather_pickled(named, same_rows)


def _gather_pickled(named: list[NamedLeaf], same_rows: bool) -> list[Any]:
    """The values of all processes, pickled by `_as_joinable` and each joined to one by `_join`."""
    description = describe("gather_for_metrics", named, partial(_describe_value, same_rows=same_rows))
    values_of_ranks = gather_objects([_as_joinable(value) for _, value in named], description)
    return [_join(values_of_name) for values_of_name in zip(*values_of_ranks, strict=True)]


def _describe_value(value: Any, same_rows: bool) -> str:
    if not isinstance(value, torch.Tensor):
        return "objects"
    return shape_and_dtype(value) if same_rows else f"rows of {list(value.shape[1:])} {value.dtype}"


def _as_joinable(value: Any) -> Any:
    """`value` as it is pickled: as a tensor, or as something to iterate over."""
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
