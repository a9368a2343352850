"""The loader whose batches the main process alone reads and sends to the others."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from common.nested import honor_type, is_namedtuple, map_together, named_leaves

from .operations import RemoteError, broadcast_object_list, is_list_of_entries
from .position import Pass, Position, put_back
from .sampler import ShortStep, Step
from .shard import DataLoaderShard
from .state import PartialState

# What to do where the main process cannot read for all.
READ_EVERYWHERE = "dispatch_batches=False lets every process read its own batches"


class DispatchedStep(NamedTuple):
    """The message of the main process to all.

    Attributes:
        batch: the samples of all processes.
        num_real: how many of them are real: the first ones. The others were repeated to fill the step up.
        share: how many each process gets.
    """

    batch: Any
    num_real: int
    share: int


class DataLoaderDispatcher(DataLoaderShard):
    """A loader whose samples the main process alone reads, whole steps at a time, and sends to the others.

    It is for samples that the others cannot read, or that can be read only once. A step is `num_processes` batches of
    the script's loader, joined, or one with `split_batches`. Every process gets an equal part of it. A last step that
    cannot be divided is filled up with samples from the first one. What the main process raises is raised on all.

    Args:
        dataset, skip_batches, kwargs: of DataLoaderShard.
        split_batches: a step is one batch of the script's loader.
        slice_fn: `slice_fn(batch, slice, process_index=…, num_processes=…)` is the part of a step's batch in `slice`;
            by default `slice_rows`.
    """

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        slice_fn: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.state = PartialState()
        kwargs.setdefault("device", self.state.device)
        super().__init__(dataset, skip_batches=skip_batches, **kwargs)
        self.split_batches = split_batches
        self.batches_per_step = 1 if split_batches else self.state.num_processes
        self.slice_fn = slice_rows if slice_fn is None else slice_fn

    @property
    def total_batch_size(self) -> int:
        return super().total_batch_size * self.batches_per_step

    @property
    def remainder(self) -> int:
        """Samples of all processes in the last step, as in DataLoaderShard; when it is yielded, of a full one too."""
        if not self.end_of_dataloader:
            return super().remainder
        return self.total_batch_size if self.short_step is None else self.short_step.num_real_all_ranks

    def __len__(self) -> int:
        batches = DataLoader.__len__(self)
        whole_steps, extra_batches = divmod(batches, self.batches_per_step)
        steps = whole_steps if self._drop_last else whole_steps + (extra_batches > 0)
        return max(0, steps - self.skip_batches)

    def _read(self, this_pass: Pass, start: Position) -> Iterator[Step]:
        """This process's part of the steps that the main process reads."""
        steps = None
        if self.state.is_main_process:
            steps = self._join_to_steps(super()._read(this_pass, start), this_pass, start)
        else:
            self._draw_as_the_main_process()
        return self._parts_of_steps(steps)

    def _draw_as_the_main_process(self) -> None:
        """Draw the seed that torch draws when it begins to read, so that the generators of all processes stay the same.

        The order is drawn on the main process alone, when the first batch is asked for. If it is drawn from torch's
        generator, the state of that differs between the processes from then on.
        """
        is_first_pass_of_workers = self._reader is None  # Workers that stay alive have one seed for all passes.
        reader = self._make_reader()
        if self.num_workers == 0:
            iter(reader)  # As in the original, `iter` of a stream is called on every process.
        elif is_first_pass_of_workers:
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)

    def _join_to_steps(self, batches: Iterator[Step], this_pass: Pass, start: Position) -> Iterator[DispatchedStep]:
        """On the main process: one step of all processes after the other, joined from batches of the script's loader.

        A step that cannot be divided among the processes is filled up as the last one, and must be it.
        """
        world_size = self.state.num_processes
        num_real = 0
        must_be_last = False
        while True:
            parts = [part.content for part in islice(batches, self.batches_per_step)]
            if not parts or (self._drop_last and len(parts) < self.batches_per_step):
                return
            if must_be_last:
                raise ValueError(
                    f"a step of {num_real} samples cannot be divided by {world_size} processes: {READ_EVERYWHERE}"
                )
            if self.slice_fn is slice_rows:
                for part in parts:
                    check_rows(part)
            batch = join_batches(parts)
            if this_pass.first_rows is None and not self._drop_last:
                this_pass.first_rows = put_back(start.first_rows, self._slice(batch, 0, world_size))
            num_real = count_rows(batch)
            share, extra_rows = divmod(num_real, world_size)
            must_be_last = extra_rows > 0
            if must_be_last and not self._drop_last:
                share += 1
                while count_rows(batch) < share * world_size:
                    batch = fill_up(batch, this_pass.first_rows)
            yield DispatchedStep(batch, num_real, share)

    def _parts_of_steps(self, steps: Iterator[DispatchedStep] | None) -> Iterator[Step]:
        """The part of this process in each step; `steps` are there on the main process alone."""
        rank = self.state.process_index
        while True:
            step = self._receive(steps)
            if step is None:
                return
            short_step = None
            if step.num_real != self.total_batch_size:
                short_step = ShortStep.filled(step.num_real, step.share, rank, self.state.num_processes)
            yield Step(self._slice(step.batch, rank * step.share, (rank + 1) * step.share), short_step)

    def _slice(self, batch: Any, begin: int, end: int) -> Any:
        how = {"process_index": self.state.process_index, "num_processes": self.state.num_processes}
        return self.slice_fn(batch, slice(begin, end), **how)

    def _receive(self, steps: Iterator[DispatchedStep] | None) -> DispatchedStep | None:
        """The next step, or None after the last one; on all processes what the main process reads, or raises."""
        error: Exception | None = None
        message: Any = None
        if steps is not None:
            try:
                message = next(steps, None)
            except Exception as failure:
                error = failure
                message = RemoteError(f"rank 0: {type(failure).__name__}: {failure}")
        message = broadcast_object_list([message])[0]
        if error is not None:
            raise error
        if isinstance(message, RemoteError):
            raise message
        return message


# What has a row for each sample: tensors and arrays, and lists and tuples without tensors that have as many entries.


def _is_array(leaf: Any) -> bool:
    return getattr(leaf, "ndim", 0) > 0


def _is_entries(data: Any) -> bool:
    return is_list_of_entries(data) and not is_namedtuple(data)


def _is_column(leaf: Any, rows: int) -> bool:
    return _is_array(leaf) or (_is_entries(leaf) and len(leaf) == rows)


def _rows_by_name(batch: Any) -> dict[str, int]:
    """The rows of a batch's tensors and arrays or, where it has none, the entries of its lists."""
    arrays = {}
    lists = {}
    for name, leaf in named_leaves(batch, _is_entries):
        if _is_array(leaf):
            arrays[name] = len(leaf)
        elif _is_entries(leaf) and leaf:
            lists[name] = len(leaf)
    return arrays or lists


def count_rows(batch: Any) -> int:
    """Samples in a batch: the rows of its first tensor or array or, where it has none, the entries of its first list.

    Raises:
        ValueError: for a batch without any.
    """
    rows = next(iter(_rows_by_name(batch).values()), None)
    if rows is None:
        raise ValueError(f"nothing in the batch has a row for each sample: {READ_EVERYWHERE}")
    return rows


def check_rows(batch: Any) -> None:
    """Raise ValueError if it is open which rows of a batch belong together."""
    rows_by_name = _rows_by_name(batch)
    if len(set(rows_by_name.values())) > 1:
        numbers = ", ".join(f"{name}: {number}" for name, number in rows_by_name.items())
        raise ValueError(f"the entries of a batch have different numbers of rows ({numbers}): {READ_EVERYWHERE}")


def join_batches(batches: Sequence[Any]) -> Any:
    """One batch with the rows of all `batches` of a step, and with what has no rows, which is the same in all.

    Raises:
        ValueError: if rows cannot be joined, or keys or what has no rows differ between the batches.
    """
    leaves_of_batches = [dict(named_leaves(batch, _is_entries)) for batch in batches]
    rows_of_batches = [count_rows(batch) for batch in batches]
    more = set().union(*leaves_of_batches) - set(leaves_of_batches[0])
    if more:
        raise ValueError(f"only some of the batches of a step have {', '.join(sorted(more))}: {READ_EVERYWHERE}")
    joined = {}
    for name, first in leaves_of_batches[0].items():
        leaves = [leaves.get(name) for leaves in leaves_of_batches]
        are_columns = list(map(_is_column, leaves, rows_of_batches))
        if all(are_columns):
            joined[name] = _join_columns(name, leaves)
        elif not any(are_columns) and all(leaf == first for leaf in leaves):
            joined[name] = first
        else:
            raise ValueError(f"{name} differs between the batches of a step: {READ_EVERYWHERE}")
    return _with_leaves(batches[0], joined)


def fill_up(batch: Any, first_rows: Any) -> Any:
    """`batch` with `first_rows` after its own rows. What has no rows stays as it is."""
    rows = count_rows(batch)
    num_first_rows = count_rows(first_rows)
    first_leaves = dict(named_leaves(first_rows, _is_entries))
    filled = {}
    for name, leaf in named_leaves(batch, _is_entries):
        first = first_leaves.get(name)
        if not _is_column(leaf, rows):
            filled[name] = leaf
        elif _is_column(first, num_first_rows):
            filled[name] = _join_columns(name, [leaf, first])
        else:
            raise ValueError(f"{name} differs between the first step and the last: {READ_EVERYWHERE}")
    return _with_leaves(batch, filled)


def slice_rows(batch: Any, rows: slice, process_index: int | None = None, num_processes: int | None = None) -> Any:
    """`rows` of everything in `batch` that has a row for each sample. The rest stays as it is."""
    number = count_rows(batch)
    sliced = {}
    for name, leaf in named_leaves(batch, _is_entries):
        sliced[name] = leaf[rows] if _is_column(leaf, number) else leaf
    return _with_leaves(batch, sliced)


def _with_leaves(batch: Any, leaves: dict[str, Any]) -> Any:
    """`batch` with `leaves` in the places of these names."""
    return map_together(lambda named: [leaves[name] for name, _ in named], batch, _is_entries)


def _join_columns(name: str, columns: list[Any]) -> Any:
    if _is_entries(columns[0]):
        return honor_type(columns[0], chain.from_iterable(columns))
    try:
        if isinstance(columns[0], torch.Tensor):
            return torch.cat(columns)
        import numpy

        return numpy.concatenate(columns)
    except (RuntimeError, TypeError, ValueError) as error:
        shapes = " and ".join(str(list(column.shape)) for column in columns)
        raise ValueError(f"{name} of the shapes {shapes} cannot be joined to a step: {READ_EVERYWHERE}") from error
