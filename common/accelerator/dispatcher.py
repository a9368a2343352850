"""The loader whose batches the main process alone reads and sends to the others."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from .operations import RemoteError, broadcast_object_list
from .position import Pass, put_back
from .rows import READ_EVERYWHERE, check_rows, count_rows, fill_up, join_batches, slice_rows
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
        # Workers that stay alive have one seed for all passes. This is True once a process without them has drawn it.
        self._drew_workers_seed = False

    @property
    def total_batch_size(self) -> int:
        return super().total_batch_size * self.batches_per_step

    @property
    def remainder(self) -> int:
        """Samples of all processes in the last step, also in a full one; -1 until it is yielded."""
        if not self.end_of_dataloader:
            return -1
        return self.total_batch_size if self.short_step is None else self.short_step.num_real_all_ranks

    def __len__(self) -> int:
        whole_steps, extra_batches = divmod(DataLoader.__len__(self), self.batches_per_step)
        has_short_step = extra_batches > 0 and not self._drop_last
        steps = whole_steps + 1 if has_short_step else whole_steps
        return max(0, steps - self.skipped_steps)

    def _read(self, this_pass: Pass) -> Iterator[Step]:
        """This process's part of the steps that the main process reads."""
        steps: Iterator[Step] = iter(())
        try:
            if self.state.is_main_process:
                batches = self._joined_batches(super()._read(this_pass))
                steps = self._whole_steps(batches, this_pass)
            else:
                self._draw_torchs_seed()
                if self.use_stateful_dataloader:
                    # This rank's checkpoint needs `drawn_from` too. Without it the order would count as lost.
                    this_pass.begin_order(self._samplers[-1])
        except Exception as error:
            steps = _failed_steps(error)
        return self._own_parts(steps)

    def _draw_torchs_seed(self) -> None:
        """Draw the seed that torch draws when it begins to read, so that the generators of all processes stay the same.

        The order is drawn on the main process alone, when the first batch is asked for. If it is drawn from torch's
        generator, the state of that differs between the processes from then on.
        """
        if self.num_workers == 0:
            iter(self._get_reader())  # As in the original, `iter` of a stream is called on every process.
        elif not (self.persistent_workers and self._drew_workers_seed):
            self._drew_workers_seed = True
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)

    def _joined_batches(self, steps: Iterator[Step]) -> Iterator[Any]:
        """On the main process: the batch of each step, joined from batches of the script's loader."""
        for group in groups_of(steps, self.batches_per_step):
            parts = [step.content for step in group]
            if self._drop_last and len(parts) < self.batches_per_step:
                return
            if self.slice_fn is slice_rows:  # A script's own function knows which rows belong together.
                for part in parts:
                    check_rows(part)
            yield join_batches(parts)

    def _whole_steps(self, batches: Iterator[Any], this_pass: Pass) -> Iterator[Step]:
        """On the main process: the steps of all processes, each with a batch that can be divided between them.

        A last step that cannot be divided is filled up, or loses the rest with `drop_last`.
        """
        world_size = self.state.num_processes
        for batch in batches:
            if this_pass.first_rows is None and not self._drop_last:
                first_rows = self._slice(batch, 0, world_size)
                # A resumed pass fills up with the rows of the epoch's first step, which the checkpoint holds.
                this_pass.first_rows = put_back(this_pass.start.first_rows, first_rows)
            num_real = count_rows(batch)
            share, extra_rows = divmod(num_real, world_size)
            if extra_rows > 0:
                if next(batches, None) is not None:
                    raise ValueError(
                        f"a step of {num_real} samples cannot be divided by {world_size} processes: {READ_EVERYWHERE}"
                    )
                if not self._drop_last:
                    share += 1
                    batch = fill_up(batch, this_pass.first_rows, least_rows=share * world_size)
            short_step = None
            if num_real != self.total_batch_size:
                rows = (share,) * world_size
                short_step = ShortStep(rows, num_real_all_ranks=min(num_real, sum(rows)))
            yield Step(batch, short_step)

    def _own_parts(self, steps: Iterator[Step]) -> Iterator[Step]:
        """This process's part of each of `steps`, which the main process alone has; those of the others are empty."""
        while True:
            error: Exception | None = None
            message: Any
            try:
                message = next(steps, None)
                # The main process makes its part before it sends the step, because `slice_fn` may raise too.
                own_part = None if message is None else self._own_part(message)
            except Exception as failure:
                error = failure
                message = RemoteError(f"rank 0: {type(failure).__name__}: {failure}")
            message = broadcast_object_list([message])[0]
            if error is not None:
                raise error
            if isinstance(message, RemoteError):
                raise message
            if message is None:
                return
            yield own_part or self._own_part(message)

    def _own_part(self, step: Step) -> Step:
        rank = self.state.process_index
        if step.short_step is None:
            share = self.total_batch_size // self.state.num_processes
        else:
            share = step.short_step.rows[rank]
        return step._replace(content=self._slice(step.content, rank * share, (rank + 1) * share))

    def _slice(self, batch: Any, begin: int, end: int) -> Any:
        process = {"process_index": self.state.process_index, "num_processes": self.state.num_processes}
        return self.slice_fn(batch, slice(begin, end), **process)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_drew_workers_seed": False}  # A copy starts workers of its own.


def _failed_steps(error: Exception) -> Iterator[Step]:
    """Steps that cannot be read: asking for the first one raises `error`."""
    raise error
    yield
