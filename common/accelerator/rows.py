"""The rows of a batch: functions that count, join and slice what has a row for each sample, and leave the rest alone.

Tensors and arrays have rows, and so may lists and tuples without tensors and arrays in them. Which lists do is decided
once in a pass, in the first batch that is read, by the number of their entries. So a list of three names stays whole
beside a last batch of three rows, too. Beside a tensor of two rows:

    ["a", "b"]                            two rows
    [["a", "b"], ["c"]]                   two rows: columns would all have two entries
    ["a", "b", "c"]                       no rows
    [("a", "b"), ("A", "B"), ("x", "y")]  refused: three columns, as torch's default_collate makes of texts
    [("a", "b"), ("A", "B")]              refused: two columns, or two rows

In a batch without tensors and arrays, lists have rows, and what may be columns is refused.
"""

import copy
import math
from collections.abc import Collection, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple

import torch

from common.nested import has_leaf, honor_type, is_namedtuple, leaves, named_leaves, replace_leaves

from .operations import is_torch_tensor

# The advice in each error about batches that the main process cannot divide among the others.
READ_EVERYWHERE = "dispatch_batches=False lets every process read its own batches"


def is_list_of_entries(data: Any) -> bool:
    """True for a list or tuple that is no structure: a plain one, without tensors."""
    if not isinstance(data, (list, tuple)) or is_namedtuple(data):
        return False
    return not has_leaf(is_torch_tensor, data)


def _is_array(leaf: Any) -> bool:
    return getattr(leaf, "ndim", 0) > 0


def _has_no_arrays(data: Any) -> bool:
    """True for a list of entries without arrays in it: in a batch of a loader, lists of arrays are structures."""
    return is_list_of_entries(data) and not has_leaf(_is_array, data)


class Entries:
    """What a batch holds.

    Attributes:
        by_name: all entries, by names such as `batch['boxes'][0]`.
        arrays: its tensors and arrays, which have rows.
        lists: its lists of entries, which may have rows; without empty ones.
    """

    def __init__(self, batch: Any) -> None:
        self.batch = batch
        self.by_name = dict(named_leaves(batch, _has_no_arrays, "batch"))
        self.arrays = {name: entry for name, entry in self.by_name.items() if _is_array(entry)}
        self.lists = {name: entry for name, entry in self.by_name.items() if isinstance(entry, (list, tuple)) and entry}

    def count_rows(self) -> int:
        """Samples in the batch: the rows of its first array or, where it has none, the entries of its first list.

        Raises:
            ValueError: for a batch without any, and for one of columns.
        """
        for array in self.arrays.values():
            return len(array)
        for name, entries in self.lists.items():
            _refuse_columns(name, entries)
            return len(entries)
        raise ValueError(f"nothing in the batch has a row for each sample: {READ_EVERYWHERE}")

    def lists_with_rows(self) -> list[str]:
        """The names of the lists that have as many entries as the batch has rows."""
        rows = self.count_rows()
        return [name for name, entries in self.lists.items() if len(entries) == rows]

    def check_no_columns(self) -> None:
        """Raise ValueError if a list may be one of columns, which have as many entries as the batch has rows."""
        rows = self.count_rows()
        if rows > 1:  # A column of one row is a row, too.
            for name, entries in self.lists.items():
                _refuse_columns(name, entries, rows)

    def check_rows(self, row_lists: Collection[str]) -> None:
        """Raise ValueError if arrays and `row_lists`, or without arrays all lists, have different numbers of rows."""
        rows_by_name = self.with_rows(row_lists) if self.arrays else self.lists
        numbers = {name: len(rows) for name, rows in rows_by_name.items()}
        if len(set(numbers.values())) > 1:
            listed = ", ".join(f"{name}: {number}" for name, number in numbers.items())
            raise ValueError(f"the entries of a batch have different numbers of rows ({listed}): {READ_EVERYWHERE}")

    def with_rows(self, row_lists: Collection[str]) -> dict[str, Any]:
        """By name, what has rows: the arrays and, of the lists, `row_lists`."""
        return {name: entry for name, entry in self.by_name.items() if name in self.arrays or name in row_lists}

    def copied_rows(self, row_lists: Collection[str]) -> dict[str, Any]:
        """`with_rows`, as it is now: the script may change its batch in place."""
        copies = {}
        for name, rows in self.with_rows(row_lists).items():
            copies[name] = rows.clone() if is_torch_tensor(rows) else copy.copy(rows)
        return copies

    def replace(self, others: dict[str, Any]) -> Any:
        """The batch with `others` in the place of its entries of these names."""
        return replace_leaves(self.batch, (self.by_name | others).values(), _has_no_arrays)


def _refuse_columns(name: str, entries: Sequence[Any], rows: int | None = None) -> None:
    """Raise ValueError if `entries` may be columns: lists of equally many texts, of `rows` if that number is known.

    `[("a", "b"), ("A", "B"), ("x", "y")]` may be three columns of two rows, as `[{"a": ["x", "y"]}, {"a": ["z", "w"]}]`
    may be two. Of numbers torch's default_collate makes tensors.
    """
    lengths = set()
    for entry in entries:
        for column in leaves(entry, is_list_of_entries):
            if not isinstance(column, (list, tuple)) or not all(isinstance(text, (str, bytes)) for text in column):
                return
            lengths.add(len(column))
    if len(lengths) == 1 and rows in (None, *lengths):
        raise ValueError(f"the lists in {name} may be samples or columns: {READ_EVERYWHERE}")


class WholeBatch(NamedTuple):
    """The batch of a step: `content`, and the names of the lists in it that have rows, beside tensors and arrays."""

    content: Any
    row_lists: Collection[str]

    def slice(self, rows: slice) -> Any:
        """`rows` of what has rows; the rest stays as it is."""
        entries = Entries(self.content)
        return entries.replace({name: entry[rows] for name, entry in entries.with_rows(self.row_lists).items()})

    def fill_up(self, first_rows: dict[str, Any], least_rows: int) -> "WholeBatch":
        """At least so many rows: those of `first_rows`, of the first step, follow the own, as often as is needed.

        Raises:
            ValueError: if there are no `first_rows`, or if they cannot be joined to the own.
        """
        entries = Entries(self.content)
        rows_by_name = entries.with_rows(self.row_lists)
        extra = rows_by_name.keys() ^ first_rows.keys()
        if extra:
            raise ValueError(f"only the first or the last step has {', '.join(sorted(extra))}: {READ_EVERYWHERE}")
        num_first_rows = len(next(iter(first_rows.values()), ()))
        if num_first_rows == 0:
            raise ValueError(f"the first step has no samples to fill up the last one: {READ_EVERYWHERE}")
        copies = math.ceil((least_rows - entries.count_rows()) / num_first_rows)
        filled = {}
        for name, rows in rows_by_name.items():
            filled[name] = _join_rows(name, [rows, *repeat(first_rows[name], copies)])
        return self._replace(content=entries.replace(filled))


def join_batches(batches: Sequence[Entries], row_lists: Collection[str]) -> WholeBatch:
    """One batch with the rows of all `batches` of a step, and with what has no rows, which is the same in all.

    Raises:
        ValueError: if rows cannot be joined, or keys or what has no rows differ between the batches.
    """
    first = batches[0]
    for batch in batches:
        extra = batch.by_name.keys() ^ first.by_name.keys()
        if extra:
            raise ValueError(f"only some of the batches of a step have {', '.join(sorted(extra))}: {READ_EVERYWHERE}")
    joined = {}
    for name, entry in first.by_name.items():
        values = [batch.by_name[name] for batch in batches]
        if name in row_lists or any(map(_is_array, values)):
            joined[name] = _join_rows(name, values)
        elif not all(_is_same(value, entry) for value in values[1:]):
            raise ValueError(f"{name} differs between the batches of a step: {READ_EVERYWHERE}")
    return WholeBatch(first.replace(joined), row_lists)


def _is_same(leaf: Any, other: Any) -> bool:
    """True for two equal values without rows."""
    try:
        return bool(leaf == other or (leaf != leaf and other != other))  # NaN equals NaN here.
    except Exception:  # A class of the script's own may raise anything. Such values count as different.
        return False


def _join_rows(name: str, parts: list[Any]) -> Any:
    are_lists = [isinstance(part, (list, tuple)) for part in parts]
    if all(are_lists):
        return honor_type(parts[0], chain.from_iterable(parts))
    try:
        if any(are_lists):
            raise TypeError("some of them are lists")
        if isinstance(parts[0], torch.Tensor):
            return torch.cat(parts)
        import numpy

        return numpy.concatenate(parts)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{name} cannot be joined to a step ({error}): {READ_EVERYWHERE}") from error
