"""The rows of a batch: functions that count, join and slice what has a row for each sample, and leave the rest alone.

Tensors and arrays have rows, and so do lists (`is_list_of_entries`) that have as many entries. In a batch without
tensors and arrays, lists have rows, and one of nothing but lists is refused. Beside a tensor of two rows:

    ["a", "b"]                   two rows
    [["a", "b"], ["c"]]          two rows: columns would both have two entries
    [("a", "b"), ("A", "B")]     two rows, or two columns, as default_collate makes: refused where it is divided
    ["a", "b", "c"]              no rows
"""

import math
from collections.abc import Sequence
from itertools import chain, repeat
from typing import Any

import torch

from common.nested import honor_type, is_namedtuple, leaves, named_leaves, replace_leaves

# The advice in each error about batches that the main process cannot divide among the others.
READ_EVERYWHERE = "dispatch_batches=False lets every process read its own batches"


def is_list_of_entries(data: Any) -> bool:
    """True for a list or tuple that is no structure: a plain one, without tensors."""
    if not isinstance(data, (list, tuple)) or is_namedtuple(data):
        return False
    return not any(isinstance(leaf, torch.Tensor) for leaf in leaves(data))


def _is_array(leaf: Any) -> bool:
    return getattr(leaf, "ndim", 0) > 0


def _has_rows(leaf: Any, rows: int) -> bool:
    """True for a tensor or array, and for a list with as many entries as the batch has `rows`."""
    return _is_array(leaf) or (is_list_of_entries(leaf) and len(leaf) == rows)


def _may_be_columns(entries: Any, rows: int) -> bool:
    """True if there are as many `entries` as rows, all of them lists of as many values, or dicts of such lists."""
    lengths = set()
    for entry in entries:
        for column in leaves(entry, is_list_of_entries):
            lengths.add(len(column) if is_list_of_entries(column) else None)
    return len(entries) == rows and lengths == {rows}


def _rows_by_name(batch: Any) -> dict[str, int]:
    """The rows of a batch's tensors and arrays or, where it has none, entries of its lists; refuses lists of lists."""
    arrays = {}
    lists = {}
    for name, leaf in named_leaves(batch, is_list_of_entries):
        if _is_array(leaf):
            arrays[name] = len(leaf)
        elif is_list_of_entries(leaf) and leaf:
            lists[name] = leaf
    if arrays:
        return arrays
    for name, entries in lists.items():
        if all(isinstance(entry, (list, tuple)) or _is_array(entry) for entry in entries):
            raise _ambiguous(name)
    return {name: len(entries) for name, entries in lists.items()}


def _ambiguous(name: str) -> ValueError:
    return ValueError(f"the lists in {name or 'a batch'} may be samples or columns: {READ_EVERYWHERE}")


def count_rows(batch: Any) -> int:
    """Samples in a batch: the rows of its first tensor or array or, where it has none, the entries of its first list.

    Raises:
        ValueError: for a batch without any.
    """
    rows = next(iter(_rows_by_name(batch).values()), None)
    if rows is None:
        raise ValueError(f"nothing in the batch has a row for each sample: {READ_EVERYWHERE}")
    return rows


def check_rows(batch: Any, is_divided: bool) -> None:
    """Raise ValueError if the tensors of a batch or, where it has none, its lists have different numbers of rows.

    One that `is_divided` between processes must not have columns that could be taken for rows either.
    """
    rows_by_name = _rows_by_name(batch)
    if len(set(rows_by_name.values())) > 1:
        numbers = ", ".join(f"{name}: {number}" for name, number in rows_by_name.items())
        raise ValueError(f"the entries of a batch have different numbers of rows ({numbers}): {READ_EVERYWHERE}")
    rows = next(iter(rows_by_name.values()), 0)
    if is_divided and rows > 1:
        for name, leaf in named_leaves(batch, is_list_of_entries):
            if is_list_of_entries(leaf) and _may_be_columns(leaf, rows):
                raise _ambiguous(name)


def join_batches(batches: Sequence[Any]) -> Any:
    """One batch with the rows of all `batches` of a step, and with what has no rows, which is the same in all.

    Raises:
        ValueError: if rows cannot be joined, or keys or what has no rows differ between the batches.
    """
    leaves_by_batch = [dict(named_leaves(batch, is_list_of_entries)) for batch in batches]
    rows_by_batch = [count_rows(batch) for batch in batches]
    first_leaves = leaves_by_batch[0]
    for leaves_of_batch in leaves_by_batch:
        extra = leaves_of_batch.keys() ^ first_leaves.keys()
        if extra:
            raise ValueError(f"only some of the batches of a step have {', '.join(sorted(extra))}: {READ_EVERYWHERE}")
    joined = {}
    for name, first in first_leaves.items():
        values = [leaves_of_batch[name] for leaves_of_batch in leaves_by_batch]
        have_rows = list(map(_has_rows, values, rows_by_batch))
        if all(have_rows):
            joined[name] = _join_rows(name, values)
        elif all(_is_same(value, first) for value in values):  # Equal lists beside unequal rows are no rows.
            joined[name] = first
        else:
            raise ValueError(f"{name} differs between the batches of a step: {READ_EVERYWHERE}")
    return replace_leaves(batches[0], joined.values(), is_list_of_entries)


def _is_same(leaf: Any, other: Any) -> bool:
    """True for two equal values that are no tensors or arrays. NaN equals NaN here."""
    if _is_array(leaf) or _is_array(other):
        return False
    try:
        return bool(leaf == other or (leaf != leaf and other != other))
    except (RuntimeError, ValueError):  # Values with tensors or arrays in them count as different.
        return False


def fill_up(batch: Any, first_rows: Any, least_rows: int) -> Any:
    """`batch` with at least so many rows: `first_rows` follow its own, as often as is needed. The rest stays as it is.

    Raises:
        ValueError: if there are no `first_rows`, or if they cannot be joined to those of `batch`.
    """
    rows = count_rows(batch)
    num_first_rows = count_rows(first_rows)
    if num_first_rows == 0:
        raise ValueError(f"the first step has no samples to fill up the last one: {READ_EVERYWHERE}")
    copies = math.ceil((least_rows - rows) / num_first_rows)
    first_leaves = dict(named_leaves(first_rows, is_list_of_entries))
    filled = {}
    for name, leaf in named_leaves(batch, is_list_of_entries):
        first = first_leaves.get(name)
        if not _has_rows(leaf, rows) or (not _has_rows(first, num_first_rows) and _is_same(leaf, first)):
            filled[name] = leaf
        elif _has_rows(first, num_first_rows):
            filled[name] = _join_rows(name, [leaf, *repeat(first, copies)])
        else:
            raise ValueError(f"{name} differs between the first step and the last: {READ_EVERYWHERE}")
    return replace_leaves(batch, filled.values(), is_list_of_entries)


def slice_rows(batch: Any, rows: slice, process_index: int | None = None, num_processes: int | None = None) -> Any:
    """`rows` of everything in `batch` that has a row for each sample. The rest stays as it is."""
    # The process is in the signature because this is a `slice_fn`. It is not needed here.
    number = count_rows(batch)
    sliced = list(leaves(batch, is_list_of_entries))
    for place, leaf in enumerate(sliced):
        if _has_rows(leaf, number):
            sliced[place] = leaf[rows]
    return replace_leaves(batch, sliced, is_list_of_entries)


def _join_rows(name: str, parts: list[Any]) -> Any:
    if all(map(is_list_of_entries, parts)):
        return honor_type(parts[0], chain.from_iterable(parts))
    try:
        if any(map(is_list_of_entries, parts)):
            raise TypeError("some of them are lists")
        if isinstance(parts[0], torch.Tensor):
            return torch.cat(parts)
        import numpy

        return numpy.concatenate(parts)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{name} cannot be joined to a step ({error}): {READ_EVERYWHERE}") from error
