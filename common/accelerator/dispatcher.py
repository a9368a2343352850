"""The loader whose batches the main process alone reads and sends to the others."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from common.nested import NamedLeaf, honor_type, is_namedtuple, map_nested, map_together, named_leaves

from .operations import broadcast_object_list, is_list_of_entries, send_to_device
from .position import LastYielded, Pass, put_back
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
        is_last: the step ends the epoch.
    """

    batch: Any
    num_real: int
    share: int
    is_last: bool


class ReadingFailed(NamedTuple):
    """The message in place of a step that could not be read."""

    error: str


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
        self._seed_is_drawn = False  # of workers that stay alive, on the processes that do not read

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_seed_is_drawn": False}

    @property
    def total_batch_size(self) -> int:
        return super().total_batch_size * self.batches_per_step

    def __len__(self) -> int:
        batches = DataLoader.__len__(self)
        whole_steps, extra_batches = divmod(batches, self.batches_per_step)
        steps = whole_steps if self._drop_last else whole_steps + (extra_batches > 0)
        return max(0, steps - self.skip_batches)

    def _read(self, this_pass: Pass) -> Iterator[Step]:
        """On the main process the batches of all processes, joined to steps; nothing on the others."""
        if self.state.is_main_process:
            return self._join_to_steps(super()._read(this_pass), this_pass)
        self._draw_as_the_main_process(this_pass)
        return iter(())

    def _draw_as_the_main_process(self, this_pass: Pass) -> None:
        """Draw the seed that torch draws when it begins to read, so that the generators of all processes stay the same.

        The order is drawn on the main process alone, when the first batch is asked for. If it is drawn from torch's
        generator, the state of that differs between the processes from then on.
        """
        if self.num_workers == 0:
            # As in the original, `iter` of a stream is called on every process.
            self._iterator_of_torch(this_pass)
        elif not self._seed_is_drawn:
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
            self._seed_is_drawn = self.persistent_workers  # These have one seed for all passes.

    def _join_to_steps(self, reading: Iterator[Step], this_pass: Pass) -> Iterator[Step]:
        """One step of all processes after the other, joined from the batches of the script's loader.

        The first rows of the first one are kept, to fill the last one up.
        """
        needs_first_rows = not self._drop_last
        while True:
            parts = [part.content for part in islice(reading, self.batches_per_step)]
            if not parts or (self._drop_last and len(parts) < self.batches_per_step):
                return
            if self.slice_fn is slice_rows:
                for part in parts:
                    check_rows(part)
            batch = join_batches(parts)
            if needs_first_rows:
                this_pass.first_rows = self._slice(batch, 0, self.state.num_processes)
                if this_pass.saved is not None:
                    this_pass.first_rows = put_back(this_pass.saved.first_rows, this_pass.first_rows)
                needs_first_rows = False
            yield Step(batch, None)

    def _steps(self, reading: Iterator[Step], this_pass: Pass) -> Iterator[tuple[Any, LastYielded]]:
        rank = self.state.process_index
        steps_of_all = self._dispatch(reading, this_pass) if self.state.is_main_process else None
        remainder = self._count_remainder()
        is_last = False
        while not is_last:
            step = self._receive(steps_of_all)
            if step is None:
                return
            is_last = step.is_last
            own = self._slice(step.batch, rank * step.share, (rank + 1) * step.share)
            if self.device is not None:
                own = send_to_device(own, self.device, self._non_blocking)
            short_step = None
            if step.num_real != self.total_batch_size:
                short_step = ShortStep.filled(step.num_real, step.share, rank, self.state.num_processes)
            yield own, LastYielded(is_last, step.num_real if is_last else remainder, short_step)

    def _dispatch(self, reading: Iterator[Step], this_pass: Pass) -> Iterator[DispatchedStep]:
        """The steps of all processes, on the main one. A step is read ahead, so that the last one is known."""
        step = next(reading, None)
        while step is not None:
            following = next(reading, None)
            this_pass.read_ahead = None if following is None else following.content
            is_last = following is None
            rows = count_rows(step.content)
            share = self._rows_per_process(rows, is_last)
            batch = step.content
            while count_rows(batch) < share * self.state.num_processes:
                batch = fill_up(batch, this_pass.first_rows)
            yield DispatchedStep(batch, rows, share, is_last)
            step = following

    def _rows_per_process(self, rows: int, is_last: bool) -> int:
        share, extra_rows = divmod(rows, self.state.num_processes)
        if extra_rows == 0:
            return share
        if not is_last:
            raise ValueError(
                f"a step of {rows} samples cannot be divided by {self.state.num_processes} processes: {READ_EVERYWHERE}"
            )
        return share if self._drop_last else share + 1

    def _slice(self, batch: Any, begin: int, end: int) -> Any:
        how = {"process_index": self.state.process_index, "num_processes": self.state.num_processes}
        return self.slice_fn(batch, slice(begin, end), **how)

    def _receive(self, steps: Iterator[DispatchedStep] | None) -> DispatchedStep | None:
        """The next step, or None after the last one; on all processes what the main process reads, or raises."""
        error = None
        message: Any = None
        if steps is not None:
            try:
                message = next(steps, None)
            except Exception as failure:
                error = failure
                message = ReadingFailed(f"rank 0: {type(error).__name__}: {error}")
        message = broadcast_object_list([message])[0]
        if isinstance(message, ReadingFailed):
            raise error or RuntimeError(message.error)
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

    def join(named: list[NamedLeaf]) -> list[Any]:
        joined = []
        for name, first in named:
            leaves = [leaves.get(name) for leaves in leaves_of_batches]
            are_columns = list(map(_is_column, leaves, rows_of_batches))
            if all(are_columns):
                joined.append(_join_columns(name, leaves))
            elif not any(are_columns) and all(leaf == first for leaf in leaves):
                joined.append(first)
            else:
                raise ValueError(f"{name} differs between the batches of a step: {READ_EVERYWHERE}")
        return joined

    return map_together(join, batches[0], _is_entries)


def fill_up(batch: Any, first_rows: Any) -> Any:
    """`batch` with `first_rows` after its own rows. What has no rows stays as it is."""
    rows = count_rows(batch)
    num_first_rows = count_rows(first_rows)
    first_leaves = dict(named_leaves(first_rows, _is_entries))

    def fill(named: list[NamedLeaf]) -> list[Any]:
        filled = []
        for name, leaf in named:
            first = first_leaves.get(name)
            if not _is_column(leaf, rows):
                filled.append(leaf)
            elif _is_column(first, num_first_rows):
                filled.append(_join_columns(name, [leaf, first]))
            else:
                raise ValueError(f"{name} differs between the first step and the last: {READ_EVERYWHERE}")
        return filled

    return map_together(fill, batch, _is_entries)


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


def slice_rows(batch: Any, rows: slice, process_index: int | None = None, num_processes: int | None = None) -> Any:
    """`rows` of everything in `batch` that has a row for each sample. The rest stays as it is."""
    number = count_rows(batch)

    def slice_leaf(leaf: Any) -> Any:
        return leaf[rows] if _is_column(leaf, number) else leaf

    return map_nested(slice_leaf, batch, is_leaf=_is_entries)
