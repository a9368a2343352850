"""The loader whose batches the main process alone reads and sends to the others."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from .operations import broadcast_object_list
from .position import Position
from .reader import Order
from .remote_errors import RemoteError, run_on_all_ranks
from .rows import READ_EVERYWHERE, Entries, WholeBatch, join_batches
from .sampler import ShortStep, Step, groups_of
from .shard import DataLoaderShard
from .state import PartialState


class DataLoaderDispatcher(DataLoaderShard):
    """A loader whose samples the main process alone reads, whole steps at a time, and sends to the others.

    It is for samples that the others cannot read, or that can be read only once. A step is `num_processes` batches of
    the script's loader, joined, or one with `split_batches`. Every process receives the whole step, and keeps an equal
    part of it. A last step that cannot be divided is filled up with samples from the first one. For two processes, and
    the samples 0 to 4 in batches of two:

        the main process reads   all receive   process 0 keeps   process 1 keeps
        [0 1] [2 3]              [0 1 2 3]     [0 1]             [2 3]
        [4]                      [4 0]         [4]               [0]

    What the main process raises while it reads or slices is raised on all.

    Args:
        dataset, kwargs: of DataLoaderShard.
        split_batches: a step is one batch of the script's loader.
        slice_fn: `slice_fn(batch, slice, process_index=…, num_processes=…)` is the part of a step's batch in `slice`;
            None takes its rows. What it raises on a process other than the main one is raised there alone.
    """

    num_skip_samplers = 1  # The original's dispatcher tells the epoch to as few samplers as a loader that skips.

    def __init__(
        self, dataset: Any, split_batches: bool = False, slice_fn: Callable[..., Any] | None = None, **kwargs: Any
    ) -> None:
        self.state = PartialState()
        kwargs.setdefault("device", self.state.device)
        super().__init__(dataset, **kwargs)
        self.split_batches = split_batches
        self.batches_read_per_step = 1 if split_batches else self.state.num_processes
        self.slice_fn = slice_fn

    @property
    def total_batch_size(self) -> int:
        return super().total_batch_size or self.batches_read_per_step  # of unknown size, a batch counts as one sample

    @property
    def remainder(self) -> int:
        """Samples of all processes in the last step, also in a full one; -1 until it is yielded."""
        this_pass = self.progress.current
        if this_pass is None or not this_pass.position.is_over:
            return -1
        return self.total_batch_size if self.short_step is None else self.short_step.num_real_all_ranks

    def __len__(self) -> int:
        whole_steps, extra_batches = divmod(DataLoader.__len__(self), self.batches_read_per_step)
        has_short_step = extra_batches > 0 and not self._drop_last
        steps = whole_steps + 1 if has_short_step else whole_steps
        return max(0, steps - self.skip_batches)

    def _read(self, order: Order) -> Iterator[Step]:
        """This process's part of the steps that the main process reads."""
        if self.state.num_processes == 1 and self.slice_fn is None:
            return map(self._undivided, super()._read(order))
        reader = run_on_all_ranks(partial(self._reader_of, order))
        if self.state.is_main_process:
            steps = run_on_all_ranks(reader.read)
            # Whether a step is short is known when all its batches are joined.
            batches = self._joined_batches(step.content for step in steps)
            return self._send_steps(self._whole_steps(batches), order.position)
        run_on_all_ranks(reader.draw_only)
        return self._receive_steps(order.position)

    def _undivided(self, step: Step) -> Step:
        """A step of the only process, which gets the whole batch, whatever has rows in it."""
        entries = Entries(step.content)
        try:
            entries.check_rows([])
            num_real = entries.count_rows()
        except ValueError:  # Nothing has rows, or there are different numbers of them.
            return step
        if num_real == self.total_batch_size:
            return step
        return step._replace(short_step=ShortStep((num_real,), num_real))

    def _joined_batches(self, batches: Iterator[Any]) -> Iterator[WholeBatch]:
        """On the main process: the batch of each step, joined from `batches` of the script's loader.

        The first batch that the pass reads decides which lists have rows.
        """
        is_checked = self.slice_fn is None  # A script's own function knows which rows belong together.
        row_lists = None
        for parts in groups_of(map(Entries, batches), self.batches_read_per_step):
            if self._drop_last and len(parts) < self.batches_read_per_step:
                return
            if row_lists is None:
                row_lists = parts[0].lists_with_rows()
                if is_checked:
                    parts[0].check_no_columns()
            if is_checked:
                for part in parts:
                    part.check_rows(row_lists)
            yield join_batches(parts, row_lists)

    def _whole_steps(self, batches: Iterator[WholeBatch]) -> Iterator[Step]:
        """On the main process: the steps of all processes, each with a batch that can be divided between them.

        A last step that cannot be divided is filled up, or loses the rest with `drop_last`.
        """
        world_size = self.state.num_processes
        first_rows: Any = None
        for batch in batches:
            if first_rows is None and not self._drop_last:
                first_rows = Entries(self._slice(batch, 0, world_size)).copied_rows(batch.row_lists)
            num_real = Entries(batch.content).count_rows()
            share, extra_rows = divmod(num_real, world_size)
            if extra_rows == 0:
                is_full = num_real == self.total_batch_size
                yield Step(batch, None if is_full else ShortStep((share,) * world_size, num_real))
                continue
            has_next_step = next(batches, None) is not None  # Read here alone, as `__iter__` reads ahead by itself.
            if has_next_step:
                raise ValueError(
                    f"a step of {num_real} samples cannot be divided by {world_size} processes: {READ_EVERYWHERE}"
                )
            if not self._drop_last:
                share += 1
                batch = batch.fill_up(first_rows, share * world_size)
                yield Step(batch, ShortStep((share,) * world_size, num_real))
            elif share > 0:
                yield Step(batch, ShortStep((share,) * world_size, num_real - extra_rows))

    def _send_steps(self, steps: Iterator[Step], position: Position) -> Iterator[Step]:
        """On the main process: its part of each step, which is sent to the others first, and then None or an error.

        In a run that resumes, every process may read. So each gets to know how the order was drawn, for its checkpoint.
        """
        while True:
            try:
                step = next(steps, None)
                # The part is made before the step is sent, because `slice_fn` may raise too.
                own_part = None if step is None else self._own_part(step)
            except Exception as error:
                broadcast_object_list([RemoteError(f"rank 0: {type(error).__name__}: {error}"), None])
                raise
            broadcast_object_list([step, position.order_states])
            if own_part is None:
                return
            yield own_part

    def _receive_steps(self, position: Position) -> Iterator[Step]:
        while True:
            message, position.order_states = broadcast_object_list([None, None])
            if isinstance(message, RemoteError):
                raise message
            if message is None:
                return
            yield self._own_part(message)

    def _own_part(self, step: Step) -> Step:
        rank = self.state.process_index
        if step.short_step is None:
            share = self.total_batch_size // self.state.num_processes
        else:
            share = step.short_step.rows[rank]
        return step._replace(content=self._slice(step.content, rank * share, (rank + 1) * share))

    def _slice(self, batch: WholeBatch, begin: int, end: int) -> Any:
        if self.slice_fn is None:
            return batch.slice(slice(begin, end))
        process: dict[str, Any] = {"process_index": self.state.process_index, "num_processes": self.state.num_processes}
        return self.slice_fn(batch.content, slice(begin, end), **process)
