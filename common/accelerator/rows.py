"""The rows of a batch: functions that count, join and slice what has a row for each sample, and leave the rest alone.

Tensors and arrays have rows, and so may lists and tuples without tensors in them (`is_list_of_entries`). Which ones
have rows is decided once an epoch, in the first batch that is read, by the number of their entries. So a list of three
names stays whole beside a last batch of three rows, too. Beside a tensor of two rows:

    ["a", "b"]                   two rows
    [["a", "b"], ["c"]]          two rows: columns would both have two entries
    [("a", "b"), ("A", "B")]     refused: two rows, or two columns, which torch's default_collate makes
    ["a", "b", "c"]              no rows

In a batch without tensors and arrays, lists have rows. There a list of nothing but lists is refused, and one with an
array in it.
"""

import math
from collections.abc import Collection, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple

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


def _entries(batch: Any) -> dict[str, Any]:
    """What `batch` holds, by names such as `batch['boxes'][0]`."""
    return dict(named_leaves(batch, is_list_of_entries, "batch"))


def _lists(batch: Any) -> dict[str, Any]:
    return {name: entry for name, entry in _entries(batch).items() if is_list_of_entries(entry) and entry}


def _rows_by_name(batch: Any) -> dict[str, int]:
    """The rows of a batch's tensors and arrays or, where it has none, entries of its lists; refuses lists of lists."""
    arrays = named_rows(batch, row_lists=[])
    if arrays:
        return {name: len(array) for name, array in arrays.items()}
    lists = _lists(batch)
    for name, entries in lists.items():
        holds_arrays = any(map(_is_array, entries))
        if holds_arrays or all(isinstance(entry, (list, tuple)) for entry in entries):
            raise _ambiguous(name)
    return {name: len(entries) for name, entries in lists.items()}


def _ambiguous(name: str) -> ValueError:
    return ValueError(f"the lists in {name} may be samples or columns: {READ_EVERYWHERE}")


def count_rows(batch: Any) -> int:
    """Samples in a batch: the rows of its first tensor or array or, where it has none, the entries of its first list.

    Raises:
        ValueError: for a batch without any.
    """
    rows = next(iter(_rows_by_name(batch).values()), None)
    if rows is None:
        raise ValueError(f"nothing in the batch has a row for each sample: {READ_EVERYWHERE}")
    return rows


def lists_with_rows(batch: Any) -> list[str]:
    """The names of the lists that have as many entries as the batch has rows."""
    rows = count_rows(batch)
    return [name for name, entries in _lists(batch).items() if len(entries) == rows]


def check_no_columns(batch: Any) -> None:
    """Raise ValueError if the entries of a list may be columns, each with as many entries as the batch has rows."""
    rows = count_rows(batch)
    for name, entries in _lists(batch).items():
        if _are_lists_of(rows, entries):
            raise _ambiguous(name)


def _are_lists_of(rows: int, entries: list) -> bool:
    """True if the entries hold nothing but lists of so many: `[{"a": ["x", "y"]}, {"a": ["z", "w"]}]` for two."""
    inner = list(chain.from_iterable(leaves(entry, is_list_of_entries) for entry in entries))
    if rows == 1 or not all(map(is_list_of_entries, inner)):  # A column of one row is a row, too.
        return False
    return set(map(len, inner)) == {rows}


def check_rows(batch: Any, row_lists: Collection[str]) -> None:
    """Raise ValueError if the tensors of a batch and its `row_lists` have different numbers of rows."""
    rows_by_name = _rows_by_name(batch)
    for name, entries in _lists(batch).items():
        if name in row_lists:
            rows_by_name[name] = len(entries)
    if len(set(rows_by_name.values())) > 1:
        numbers = ", ".join(f"{name}: {number}" for name, number in rows_by_name.items())
        raise ValueError(f"the entries of a batch have different numbers of rows ({numbers}): {READ_EVERYWHERE}")


class WholeBatch(NamedTuple):
    """The batch of a step: `content`, and the names of the lists in it that have rows, beside tensors and arrays."""

    content: Any
    row_lists: Collection[str]

    def slice(self, rows: slice) -> Any:
        """`rows` of what has rows; the rest stays as it is."""
        sliced = _entries(self.content)
        for name, entry in named_rows(self.content, self.row_lists).items():
            sliced[name] = entry[rows]
        return replace_leaves(self.content, sliced.values(), is_list_of_entries)

    def fill_up(self, first_rows: dict[str, Any], least_rows: int) -> "WholeBatch":
        """At least so many rows: those of `first_rows`, of the first step, follow the own, as often as is needed.

        Raises:
            ValueError: if there are no `first_rows`, or if they cannot be joined to the own.
        """
        num_first_rows = count_rows(first_rows)
        if num_first_rows == 0:
            raise ValueError(f"the first step has no samples to fill up the last one: {READ_EVERYWHERE}")
        copies = math.ceil((least_rows - count_rows(self.content)) / num_first_rows)
        filled = _entries(self.content)
        for name, rows in named_rows(self.content, self.row_lists).items():
            if name not in first_rows:
                raise ValueError(f"{name} differs between the first step and the last: {READ_EVERYWHERE}")
            filled[name] = _join_rows(name, [rows, *repeat(first_rows[name], copies)])
        content = replace_leaves(self.content, filled.values(), is_list_of_entries)
        return self._replace(content=content)


def join_batches(batches: Sequence[Any], row_lists: Collection[str]) -> WholeBatch:
    """One batch with the rows of all `batches` of a step, and with what has no rows, which is the same in all.

    Tensors, arrays and `row_lists` have rows.

    Raises:
        ValueError: if rows cannot be joined, or keys or what has no rows differ between the batches.
    """
    entries_by_batch = [_entries(batch) for batch in batches]
    first_entries = entries_by_batch[0]
    for entries in entries_by_batch:
        extra = entries.keys() ^ first_entries.keys()
        if extra:
            raise ValueError(f"only some of the batches of a step have {', '.join(sorted(extra))}: {READ_EVERYWHERE}")
    joined = {}
    for name, first in first_entries.items():
        values = [entries[name] for entries in entries_by_batch]
        if name in row_lists or any(map(_is_array, values)):
            joined[name] = _join_rows(name, values)
        elif all(_is_same(value, first) for value in values):
            joined[name] = first
        else:
            raise ValueError(f"{name} differs between the batches of a step: {READ_EVERYWHERE}")
    return WholeBatch(replace_leaves(batches[0], joined.values(), is_list_of_entries), row_lists)


def _is_same(leaf: Any, other: Any) -> bool:
    """True for two equal values without rows. NaN equals NaN here."""
    try:
        return bool(leaf == other or (leaf != leaf and other != other))
    except (RuntimeError, ValueError):  # Values with tensors or arrays in them count as different.
        return False


def named_rows(batch: Any, row_lists: Collection[str]) -> dict[str, Any]:
    """By name, what has rows in `batch`: tensors, arrays and `row_lists`."""
    return {name: entry for name, entry in _entries(batch).items() if _is_array(entry) or name in row_lists}


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
