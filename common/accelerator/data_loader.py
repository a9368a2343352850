"""A DataLoader that yields each process its share, knows its last batch, and can continue where it was stopped."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler

from ..nested import honor_type
from .operations import broadcast_object_list, concatenate, holds_tensors, send_to_device
from .sampler import (
    AllBatches,
    BatchSamplerShard,
    DistributedEvalSampler,
    EvalBatches,
    GeneratorStates,
    PartialStep,
    PassStart,
    Redraw,
    ReplayableBatches,
    SampleShard,
    SavedGenerators,
    SeedableRandomSampler,
    ShardedBatches,
    SkipBatchSampler,
    can_be_redrawn,
    generator_of,
    innermost_sampler,
    sampler_chain,
)
from .state import DistributedType, GradientState, PartialState  # noqa: F401
from .streams import (
    CountedCollate,
    CountedSample,
    CountedShard,
    EpochInWorkers,
    IterableDatasetShard,  # noqa: F401
    shard_of,
)
from .utils.dataclasses import RNGType  # noqa: F401
from .utils.random import synchronize_rng_states

logger = logging.getLogger(__name__)


@dataclass
class Pass:
    """One pass over an epoch, while it is under way.

    Attributes:
        epoch: its number.
        step: steps yielded, including those skipped at the start.
        rng_before_order: the states of the generators right before the order was drawn; None for streams.
    """

    epoch: int
    step: int
    rng_before_order: GeneratorStates | None = None


@dataclass
class LoaderPosition:
    """How far a loader is. A loader and those that `skip_first_batches` makes of it share one object.

    Attributes:
        current: the pass under way, or None.
        resume: where a checkpoint was made; the next `for` continues there.
    """

    current: Pass | None = None
    resume: Pass | None = None


class DataLoaderStateMixin:
    """What a loader tells the accumulation of gradients and `gather_for_metrics`.

    Attributes:
        end_of_dataloader: whether the batch just yielded is the last.
        remainder: samples of all processes in the last step, or -1 where that is not known. If the last step is whole,
            it is 0; only a DataLoaderDispatcher sets it, in that step, to the number of the step's samples.
        partial_step: a PartialStep where some process lacks samples of its own in this step, else None.
    """

    end_of_dataloader = False
    remainder = -1
    partial_step: PartialStep | None = None

    def reset(self) -> None:
        """Forget where the last pass ended."""
        self.end_of_dataloader = False
        self.remainder = -1
        self.partial_step = None

    def begin(self: Any) -> None:
        """Become the active loader."""
        self.reset()
        with suppress(Exception):  # as in the original: a data set without a length may raise anything
            if not self._drop_last:
                self.remainder = self.total_dataset_length % self.total_batch_size
        self.gradient_state._add_dataloader(self)

    def end(self: Any) -> None:
        """Make the loader of the outer loop, if there is one, the active one again."""
        self.gradient_state._remove_dataloader(self)
        self.reset()


class DataLoaderShard(DataLoader, DataLoaderStateMixin):
    """A DataLoader for one process of several: on the right device, resumable, aware of its end.

    `iteration` is the number of the epoch that the next `for` visits. A pass that comes to its end moves on to the
    next epoch; after a `break` the same epoch is visited again, by samplers and data sets that have `set_epoch`.
    After `load_state_dict` the next `for` continues with the batch after the last one yielded.

    Args:
        dataset, kwargs: of DataLoader.
        device: where the batches go; None leaves them.
        rng_types: generators that all processes take over from rank 0 at the start of every `for`: "torch", "cuda", or
            "generator" for `synchronized_generator`.
        synchronized_generator: the sampler's or the data set's.
        skip_batches: steps to skip in every `for`.
        use_stateful_dataloader: changes nothing: the loader has `state_dict` and `load_state_dict` with either value.
        iteration: the epoch of the first `for`.
        position: of the loader that this one is made from.
        shards: the batches that this loader draws. It is needed only where `batch_sampler` must stay the script's own
            object; by default the loader draws from `batch_sampler` itself.
    """

    def __init__(
        self,
        dataset: Any,
        device: torch.device | None = None,
        rng_types: list[str] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        position: LoaderPosition | None = None,
        shards: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, **kwargs)
        self.device = device
        self.rng_types = rng_types
        self.synchronized_generator = synchronized_generator
        self.skip_batches = skip_batches
        self.use_stateful_dataloader = use_stateful_dataloader
        self.iteration = iteration
        self.gradient_state = GradientState()
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking
        self._position = LoaderPosition() if position is None else position
        self._shards = shards
        self._warned = False

    @property
    def shards(self) -> Any:
        """Where this loader's samples come from: a batch sampler, a sampler or a stream, usually a sharded one."""
        if isinstance(self.dataset, IterableDataset):
            return self.dataset
        return batches_of(self) if self._shards is None else self._shards

    @property
    def _index_sampler(self) -> Any:
        """DataLoader draws indices from this. With `shards` it is not `batch_sampler`, which scripts may change."""
        return super()._index_sampler if self._shards is None else self._shards

    def get_sampler(self) -> Any:
        """See the function `get_sampler`."""
        return get_sampler(self)

    def set_sampler(self, sampler: Any) -> None:
        """Let `sampler` draw the sample numbers."""
        self.shards.sampler = sampler

    def set_epoch(self, epoch: int) -> None:
        """Make the next `for` visit `epoch`; where a checkpoint stopped in that very epoch, it continues there."""
        self.iteration = epoch
        resume = self._position.resume
        if resume is not None and resume.epoch != epoch:
            self._position.resume = None
        samplers = () if isinstance(self.dataset, IterableDataset) else sampler_chain(self.shards)
        for part in (*samplers, self.dataset):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    def __len__(self) -> int:
        """Batches in a whole epoch on this process, also while a checkpoint's epoch is being finished."""
        return max(0, super().__len__() - self.skip_batches)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # DataLoader names a class of its own
        position = self._position
        resume = position.resume
        position.resume = None
        if self.rng_types and resume is None:
            synchronize_rng_states(self.rng_types, self.synchronized_generator)
        self.begin()
        outer_pass = position.current
        try:
            self.set_epoch(self.iteration)
            start = self.skip_batches
            if resume is not None and not start:
                start = resume.step
            current = Pass(self.iteration, start)
            position.current = current
            for batch in self._batches(start, resume):
                current.step += 1
                if self.device is not None:
                    batch = send_to_device(batch, self.device, self._non_blocking)
                yield batch
        finally:
            position.current = outer_pass
            self.end()
        if current.step > start or resume is not None:  # as in the original, a pass without batches is no epoch
            self.iteration += 1

    def _batches(self, start: int, resume: Pass | None) -> Iterator[Any]:
        """The batches from step `start` on. Before each is yielded, the attributes of DataLoaderStateMixin are set."""
        if isinstance(self.shards, ShardedBatches):
            return self._batches_of_sampler(start, resume)
        return self._batches_of_stream(islice(self._start_reading(0, resume), start, None))

    def _batches_of_sampler(self, start: int, resume: Pass | None) -> Iterator[Any]:
        """The batches of a data set with a sampler. Its batch sampler knows which step is the last one."""
        shards = self.shards
        reading = self._start_reading(start, resume)
        for step, batch in enumerate(reading, start):
            if step == start:
                record = shards.latest_pass
                self._note_generator_states(record.rng_before_order)
            self.end_of_dataloader = step == record.last_step
            self.partial_step = record.partial_steps.get(step)
            yield batch

    def _note_generator_states(self, rng_before_order: GeneratorStates) -> None:
        if self._position.current is not None:
            self._position.current.rng_before_order = rng_before_order

    def _batches_of_stream(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches of a stream. A batch is the last one if none follows, so one batch is read ahead."""
        nothing = object()
        batch = next(batches, nothing)
        while batch is not nothing:
            following = next(batches, nothing)
            self.end_of_dataloader = following is nothing
            self.partial_step = None
            if isinstance(batch, CountedSample):
                self.partial_step = batch.partial
                batch = batch.content
            yield batch
            batch = following

    @property
    def _prefetched_batches(self) -> int:
        """Batches that the loader workers are asked for before the first one is yielded."""
        return self.num_workers * (self.prefetch_factor or 0)

    @property
    def batches_drawn_ahead(self) -> int:
        """See PassStart. ShardedBatches draws `first_batch` ahead; what the workers are asked for comes on top."""
        return self._prefetched_batches

    def _start_reading(self, first_batch: int, resume: Pass | None) -> Iterator[Any]:
        """The batches of DataLoader from number `first_batch` on, in the order of the pass `resume` if there is one.

        A stream is always read from its first batch on.
        """
        redraw = None
        if resume is not None:
            redraw = Redraw(self._order_sampler, resume.rng_before_order, self._generators())
        if isinstance(self.shards, ReplayableBatches):
            self.shards.start_next_pass(PassStart(first_batch, redraw, self.batches_drawn_ahead))
            return DataLoader.__iter__(self)
        reading = DataLoader.__iter__(self)
        if redraw is not None:
            redraw.end()  # the DataLoader has drawn a seed for its workers once more
        return reading

    @property
    def _order_sampler(self) -> Any:
        """What draws the order; None for streams."""
        return None if isinstance(self.dataset, IterableDataset) else innermost_sampler(self.shards)

    def _generators(self) -> list[torch.Generator]:
        """The generators that a pass may draw from: torch's, the sampler's and, for the workers' seed, the loader's."""
        own = [generator_of(self._order_sampler), self.generator]
        return [torch.default_generator, *(generator for generator in own if generator is not None)]

    @property
    def total_batch_size(self) -> int:
        """Samples of a whole step over all processes; batches, where the data come without a batch size."""
        # If a stream of the script's own has a `batch_size`, it may mean anything.
        source = shard_of(self.dataset) if isinstance(self.dataset, IterableDataset) else self.shards
        size = getattr(source, "batch_size", None) or self.batch_size or 1
        if getattr(source, "split_batches", False):
            return size
        return size * getattr(source, "num_processes", 1)

    @property
    def total_dataset_length(self) -> int:
        """Samples in the whole data set."""
        dataset: Any = self.dataset
        shard = shard_of(dataset)
        if isinstance(shard, CountedShard):
            dataset = shard.dataset
        return dataset.total_length if hasattr(dataset, "total_length") else len(dataset)

    def state_dict(self) -> dict[str, Any]:
        """The epoch, the steps of it that were yielded, and the states of the generators; for all processes.

        A loader that is not being iterated over is at the beginning of its epoch, also after a `break`.
        """
        current = self._position.current or self._position.resume
        sampler = self._order_sampler
        state = {
            "epoch": self.iteration if current is None else current.epoch,
            "step": 0 if current is None else current.step,
            "step_size": self.total_batch_size,
            "sampler_seed": sampler.initial_seed if isinstance(sampler, SeedableRandomSampler) else None,
            "sampler_generator": _state_of(generator_of(sampler)),
            "loader_generator": _state_of(self.generator),
            "drawn_from_torch": None,
            "drawn_from_sampler": None,
        }
        if current is not None:
            self._warn_of_what_cannot_be_exact()
            if current.rng_before_order is not None:
                state["drawn_from_torch"] = current.rng_before_order.torch
                state["drawn_from_sampler"] = current.rng_before_order.sampler
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next `for` continue there, on any number of processes with the same samples per step.

        Raises:
            ValueError: if the samples yielded before are no whole number of this loader's steps.
        """
        step = self.step_of(state_dict)
        self.iteration = state_dict["epoch"]
        self._load_generators(state_dict)
        rng_before_order = None
        if state_dict.get("drawn_from_torch") is not None:
            rng_before_order = GeneratorStates(state_dict["drawn_from_torch"], state_dict["drawn_from_sampler"])
        self._position.resume = Pass(self.iteration, step, rng_before_order) if step else None

    def step_of(self, state_dict: dict[str, Any]) -> int:
        """The steps of this loader that had been yielded when `state_dict` was saved.

        Raises:
            ValueError: if the samples yielded before are no whole number of steps.
        """
        samples = state_dict["step"] * state_dict["step_size"]
        step, rest = divmod(samples, self.total_batch_size)
        if rest:
            where = f"{samples} samples of epoch {state_dict['epoch']}"
            raise ValueError(f"it stopped after {where}, no whole number of steps of {self.total_batch_size}")
        return step

    def _load_generators(self, state_dict: dict[str, Any]) -> None:
        sampler = self._order_sampler
        if isinstance(sampler, SeedableRandomSampler) and state_dict.get("sampler_seed") is not None:
            sampler.initial_seed = state_dict["sampler_seed"]
        own = state_dict.get("sampler_generator")
        if own is not None:
            # A sampler of a single process has no generator where the checkpoint's run, on several processes, gave it
            # one. A SeedableRandomSampler makes its own when its first pass begins.
            lacks_generator = hasattr(sampler, "generator") and sampler.generator is None
            if lacks_generator:
                sampler.generator = torch.Generator()
            generator = generator_of(sampler)
            if generator is not None:
                generator.set_state(own)
        if state_dict.get("loader_generator") is not None and self.generator is not None:
            self.generator.set_state(state_dict["loader_generator"])

    def _warn_of_what_cannot_be_exact(self) -> None:
        """Say once what a resumed epoch may not repeat bit for bit."""
        if self._warned or PartialState().process_index != 0:
            return
        self._warned = True
        if isinstance(self.dataset, IterableDataset):
            logger.warning("a stream is read again up to the checkpoint: what it draws at random may come differently")
        elif not can_be_redrawn(self.shards):
            name = type(self._order_sampler).__name__
            logger.warning("%s may not draw the same order again: it is exact for the samplers of torch alone", name)
        if self.num_workers > 0:
            logger.warning("what a data set draws at random in loader workers starts anew after a checkpoint")

    def __getstate__(self) -> dict[str, Any]:
        kept = dict(vars(self))
        kept["_iterator"] = None
        del kept["gradient_state"]  # it belongs to the process
        return kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.gradient_state = GradientState()


def _state_of(generator: torch.Generator | None) -> torch.Tensor | None:
    return None if generator is None else generator.get_state()


class SkipDataLoader(DataLoaderShard):
    """A loader of a stream that skips the first `skip_batches` batches; `skip_first_batches` makes it."""

    def __init__(self, dataset: Any, skip_batches: int = 0, **kwargs: Any) -> None:
        super().__init__(dataset, skip_batches=skip_batches, **kwargs)

    def set_epoch(self, epoch: int) -> None:
        """Remember `epoch`. The data set was not prepared, and its epoch is the script's to choose."""
        self.iteration = epoch


class DispatchedStep(NamedTuple):
    """What the main process sends to all: a step's batch, and whether it is the last."""

    batch: Any
    is_last: bool


class DataLoaderDispatcher(DataLoaderShard):
    """A loader whose samples the main process alone reads, whole steps at a time, and sends to the others.

    It is for samples that the others cannot read, or that can be read only once. A step is `num_processes` batches of
    the script's loader, joined, or one with `split_batches`. Every process gets an equal part of it. A last step that
    cannot be divided is filled up with samples from the first one. What the main process raises is raised on all.

    Without loader workers the other processes make an iterator too, as in the original, but ask it for no batch. So
    `iter` of a stream is called on every process. It must succeed there, or the main process waits in vain: a file
    that only the main process has is to be opened by a generator function, which runs when a sample is asked for.

    The step after the one just yielded has been read already. On the main process a data set has drawn its random
    numbers by then, so a checkpoint in the middle of an epoch is not exact for it.

    Args:
        dataset, skip_batches, iteration, position, kwargs: of DataLoaderShard.
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
        self.slice_fn = slice_rows if slice_fn is None else slice_fn
        self._has_drawn_for_workers = False

    @property
    def batches_per_step(self) -> int:
        """Batches of the script's loader that make a step."""
        return 1 if self.split_batches else self.state.num_processes

    @property
    def total_batch_size(self) -> int:
        return super().total_batch_size * self.batches_per_step

    @property
    def batches_drawn_ahead(self) -> int:
        """See PassStart. The main process reads one step ahead; what its workers are asked for comes on top."""
        # For 3 processes without workers: when step 0 is yielded, the batches 3, 4 and 5 of step 1 have been drawn. A
        # resumed pass begins with batch 3, so 3 - 1 = 2 further batches had been drawn.
        return self._prefetched_batches + self.batches_per_step - 1

    def __len__(self) -> int:
        batches = DataLoader.__len__(self)
        whole_steps, extra_batches = divmod(batches, self.batches_per_step)
        steps = whole_steps if self._drop_last else whole_steps + (extra_batches > 0)
        return max(0, steps - self.skip_batches)

    def _batches(self, start: int, resume: Pass | None) -> Iterator[Any]:
        if self.state.is_main_process:
            steps = self._read_steps(start, resume)
        else:
            steps = None
            self._draw_as_in_the_original(resume)
        rank, processes = self.state.process_index, self.state.num_processes
        first_rows = None
        is_last = False
        while not is_last:
            step = self._receive(steps)
            if step is None:
                return
            is_last = step.is_last
            if first_rows is None and not self._drop_last:
                first_rows = self._slice(step.batch, 0, processes)
            rows = count_rows(step.batch)
            share = self._rows_per_process(rows, is_last)
            self._note_step(rows, share, is_last)
            batch = _fill_up(step.batch, first_rows, share * processes)
            yield self._slice(batch, rank * share, (rank + 1) * share)

    def _rows_per_process(self, rows: int, is_last: bool) -> int:
        share, extra_rows = divmod(rows, self.state.num_processes)
        if extra_rows == 0:
            return share
        if not is_last:
            raise ValueError(
                f"a step of {rows} samples cannot be divided by {self.state.num_processes} processes: with batches of "
                "different sizes, dispatch_batches=False lets every process read its own"
            )
        return share if self._drop_last else share + 1

    def _note_step(self, rows: int, share: int, is_last: bool) -> None:
        """Say of the step that is yielded next whether it is the last, and where it lacks samples.

        Args:
            rows: the samples that the main process has read for it.
            share: the samples that each process gets.
            is_last: whether no step follows.
        """
        self.end_of_dataloader = is_last
        if is_last:
            self.remainder = rows
        self.partial_step = None
        if rows != self.total_batch_size:
            rows_from_here_on = max(rows - self.state.process_index * share, 0)
            self.partial_step = PartialStep(
                num_real=min(rows_from_here_on, share),
                rows=share,
                num_ranks_present=self.state.num_processes,
                num_real_all_ranks=rows,
            )

    def _slice(self, batch: Any, begin: int, end: int) -> Any:
        how = {"process_index": self.state.process_index, "num_processes": self.state.num_processes}
        return self.slice_fn(batch, slice(begin, end), **how)

    def _read_steps(self, start: int, resume: Pass | None) -> Iterator[DispatchedStep]:
        """On the main process: the steps from number `start` on."""
        batches_of_steps = self._join_into_steps(self._plain_batches(start, resume))
        batch = next(batches_of_steps, None)
        while batch is not None:
            following = next(batches_of_steps, None)
            yield DispatchedStep(batch, following is None)
            batch = following

    def _plain_batches(self, start: int, resume: Pass | None) -> Iterator[Any]:
        """The batches of the script's loader from step `start` on."""
        first_batch = start * self.batches_per_step
        reading = self._start_reading(first_batch, resume)
        if not isinstance(self.shards, ReplayableBatches):
            yield from islice(reading, first_batch, None)
            return
        for number, batch in enumerate(reading):
            if number == 0:
                self._note_generator_states(self.shards.latest_pass.rng_before_order)
            yield batch

    def _join_into_steps(self, batches: Iterator[Any]) -> Iterator[Any]:
        """One batch for each step, joined from the batches of the script's loader."""
        while True:
            parts = list(islice(batches, self.batches_per_step))
            if not parts or (self._drop_last and len(parts) < self.batches_per_step):
                return
            yield parts[0] if len(parts) == 1 else _join_rows(parts)

    def _draw_as_in_the_original(self, resume: Pass | None) -> None:
        """On the other processes: draw what the original draws there when a pass begins.

        That is what making an iterator draws: the seed for the workers and, if there are workers, the order of the
        batches that they are asked for. Without workers, torch's samplers draw the order when the first batch is asked
        for, on the main process alone. A sampler that has no generator then draws from torch's, whose state differs
        between the main process and the others from then on.

        If the pass is resumed, all this was drawn when it began, and the generators are left as they are.
        """
        present_states = SavedGenerators(self._generators())
        self._draw_what_an_iterator_draws()
        if resume is not None:
            present_states.restore()

    def _draw_what_an_iterator_draws(self) -> None:
        if self.num_workers == 0:
            DataLoader.__iter__(self)
            return
        if not (self.persistent_workers and self._has_drawn_for_workers):
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        self._has_drawn_for_workers = True
        if not isinstance(self.dataset, IterableDataset):
            for _ in islice(self.shards, self._prefetched_batches):
                pass

    def _receive(self, steps: Iterator[DispatchedStep] | None) -> DispatchedStep | None:
        """The next step, or None after the last one; on all processes what the main process reads, or raises."""
        failure = None
        message: Any = None
        if steps is not None:
            try:
                message = next(steps, None)
            except Exception as error:
                failure = error
                message = f"rank 0: {type(error).__name__}: {error}"
        message = broadcast_object_list([message])[0]
        if isinstance(message, str):
            raise failure or RuntimeError(message)
        return message


def count_rows(batch: Any) -> int:
    """Samples in a batch: the rows of its first tensor or, where there is none, the entries of its first list."""
    if isinstance(batch, Mapping):
        return count_rows(next(iter(batch.values())))
    if isinstance(batch, (list, tuple)) and holds_tensors(batch):
        return count_rows(batch[0])
    return len(batch)


def _fill_up(batch: Any, first_rows: Any, rows: int) -> Any:
    """`batch` with `first_rows` behind it, as often as it takes until it has `rows` samples or more."""
    while count_rows(batch) < rows:
        batch = _join_rows([batch, first_rows])
    return batch


def _join_rows(parts: Sequence[Any]) -> Any:
    """`operations.concatenate`, for lists with an entry per sample too."""
    first: Any = parts[0]
    if isinstance(first, Mapping):
        columns = {key: [part[key] for part in parts] for key in first}
        mapping: Any = type(first)
        return mapping({key: _join_rows(column) for key, column in columns.items()})
    if isinstance(first, (list, tuple)) and holds_tensors(first):
        return honor_type(first, map(_join_rows, zip(*parts, strict=True)))
    if isinstance(first, (list, tuple)):
        return type(first)(entry for part in parts for entry in part)
    return concatenate(list(parts))


def slice_rows(batch: Any, rows: slice, process_index: int | None = None, num_processes: int | None = None) -> Any:
    """`operations.slice_tensors`, for lists with an entry per sample too. Single numbers and texts stay as they are."""
    if isinstance(batch, Mapping):
        mapping: Any = type(batch)
        return mapping({key: slice_rows(column, rows) for key, column in batch.items()})
    if isinstance(batch, (list, tuple)) and holds_tensors(batch):
        return honor_type(batch, (slice_rows(column, rows) for column in batch))
    has_rows = hasattr(batch, "__len__") and not isinstance(batch, str)
    return batch[rows] if has_rows else batch


class _EmptyBatchCollate:
    """`collate_fn`, except that it makes an empty batch of the usual structure where a process gets no samples."""

    def __init__(self, dataset: Any, collate_fn: Callable[[Any], Any]) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn

    def __call__(self, samples: Any) -> Any:
        if isinstance(samples, list) and not samples:
            return without_rows(self.collate_fn(self._first_sample()))
        return self.collate_fn(samples)

    def _first_sample(self) -> Any:
        if hasattr(self.dataset, "__getitems__"):
            return self.dataset.__getitems__([0])
        return [self.dataset[0]]


def without_rows(batch: Any) -> Any:
    """`batch` with nothing in it: empty tensors and lists. What has no rows, like a scalar, stays."""
    if isinstance(batch, Mapping):
        mapping: Any = type(batch)
        return mapping({key: without_rows(part) for key, part in batch.items()})
    if isinstance(batch, torch.Tensor):
        return batch if batch.ndim == 0 else batch[:0]
    if isinstance(batch, (list, tuple)) and holds_tensors(batch):
        return honor_type(batch, (without_rows(part) for part in batch))
    if isinstance(batch, list):
        return []
    if getattr(batch, "shape", None):
        return batch[:0]
    return batch


# Preparing


def get_sampler(dataloader: DataLoader) -> Any:
    """What draws the sample numbers for the batch sampler of `dataloader`; None where there is no such thing."""
    batches = batches_of(dataloader)
    if isinstance(batches, ReplayableBatches):
        batches = batches.batch_sampler
    return getattr(batches, "sampler", None)


def batches_of(dataloader: DataLoader) -> Any:
    """What draws the batches: the batch sampler or, in a loader with `batch_size=None`, the sampler."""
    return dataloader.sampler if dataloader.batch_sampler is None else dataloader.batch_sampler


@dataclass
class _Source:
    """What a prepared loader reads, as arguments for it.

    Attributes:
        dataset: the data set; for a stream perhaps its shard.
        sampling: the arguments that say which samples it reads: the batch sampler, the sampler or the batch size.
        synchronized_generator: the one whose state all processes take over from rank 0.
        other: further arguments.
    """

    dataset: Any
    sampling: dict[str, Any]
    synchronized_generator: torch.Generator | None = None
    other: dict[str, Any] = field(default_factory=dict)


class _Sharing(NamedTuple):
    """How processes share the data of a loader."""

    num_processes: int
    process_index: int
    split_batches: bool
    even_batches: bool
    dispatch_batches: bool


def prepare_data_loader(
    dataloader: DataLoader,
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: list[str] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
) -> DataLoaderShard:
    """The loader for one process: its share of the batches that `dataloader` would make on a single one.

    On several processes a sampler without a generator gets one here, seeded from torch's; a loader whose sampler is a
    DistributedEvalSampler is sharded already and keeps its batches. With `use_seedable_sampler` and no `data_seed`
    this call is a collective: all processes take over rank 0's seed.

    Args:
        dataloader: what a single process would iterate over.
        device: where batches go with `put_on_device`.
        num_processes, process_index: by default those of the run.
        split_batches, even_batches, non_blocking: see DataLoaderConfiguration.
        put_on_device: send the batches to `device`.
        rng_types: generators to take over from rank 0 at the start of every `for`: "torch", "cuda", and "generator",
            the sampler's or the data set's.
        dispatch_batches: the main process reads for all, see DataLoaderDispatcher; by default for streams, if
            `put_on_device` is on.
        slice_fn_for_dispatch: see DataLoaderDispatcher.
        use_seedable_sampler: a RandomSampler becomes a SeedableRandomSampler.
        data_seed: its seed; by default `torch.initial_seed()` of rank 0.
        use_stateful_dataloader: prepared loaders have `state_dict` and `load_state_dict` with either value.

    Raises:
        NotImplementedError: for `torch_device_mesh` and a loader with `in_order=False`.
        ValueError: for a batch size that cannot be split, none where one is needed, `dispatch_batches` without
            `put_on_device`, and on several processes for a DistributedSampler.
    """
    if torch_device_mesh is not None or not getattr(dataloader, "in_order", True):
        raise NotImplementedError("torch_device_mesh and loaders with in_order=False are out of scope")
    if dispatch_batches is None:
        dispatch_batches = put_on_device and isinstance(dataloader.dataset, IterableDataset)
    if dispatch_batches and not put_on_device:
        raise ValueError("dispatch_batches=True requires put_on_device=True")
    state = PartialState()
    num_processes = state.num_processes if num_processes is None else num_processes
    sharing = _Sharing(
        num_processes=num_processes,
        process_index=state.process_index if process_index is None else process_index,
        split_batches=split_batches,
        even_batches=even_batches and num_processes > 1,  # a single process gets its batches unchanged
        dispatch_batches=dispatch_batches,
    )
    _check_batch_size(dataloader, sharing)
    batches = batches_of(dataloader)
    if use_seedable_sampler:
        batches = _replace_random_sampler(batches, data_seed)
    source = _source(dataloader, batches, sharing, use_seedable_sampler)
    loading = _loading_options(dataloader) | source.sampling | source.other
    loading["_drop_last"] = dataloader.drop_last
    loading["_non_blocking"] = non_blocking
    if dispatch_batches:
        loading["generator"] = None  # as in the original: what the loader itself draws comes from torch's generator
        return DataLoaderDispatcher(source.dataset, split_batches, slice_fn=slice_fn_for_dispatch, **loading)
    return DataLoaderShard(
        source.dataset,
        device=device if put_on_device else None,
        rng_types=_synchronizable(rng_types, source.synchronized_generator),
        synchronized_generator=source.synchronized_generator,
        use_stateful_dataloader=use_stateful_dataloader,
        **loading,
    )


def _check_batch_size(dataloader: DataLoader, sharing: _Sharing) -> None:
    if not sharing.split_batches:
        return
    size = dataloader.batch_size
    if size is None:
        size = getattr(batches_of(dataloader), "batch_size", None)
    if size is None:
        raise ValueError("split_batches=True needs a loader or a batch sampler with a `batch_size`")
    if size % sharing.num_processes:
        raise ValueError(
            f"split_batches needs a batch size that {sharing.num_processes} processes can split, not {size}"
        )


def _replace_random_sampler(batches: Any, data_seed: int | None) -> Any:
    """Put a SeedableRandomSampler in the place of a RandomSampler: in `batches`, or as the result if it is one."""
    # A loader with `batch_size=None` draws from a sampler, without batches.
    if isinstance(batches, RandomSampler):
        return _seedable(batches, data_seed)
    sampler = getattr(batches, "sampler", None)
    if isinstance(sampler, RandomSampler):
        batches.sampler = _seedable(sampler, data_seed)
    return batches


def _seedable(sampler: RandomSampler, data_seed: int | None) -> SeedableRandomSampler:
    if data_seed is None:
        data_seed = broadcast_object_list([torch.initial_seed()])[0]
    return SeedableRandomSampler(
        data_source=sampler.data_source,
        replacement=sampler.replacement,
        num_samples=sampler._num_samples,
        generator=sampler.generator,
        data_seed=data_seed,
    )


def _source(dataloader: DataLoader, batches: Any, sharing: _Sharing, use_seedable_sampler: bool) -> _Source:
    """What the loader of one process reads, where a single process would draw `batches`."""
    sampler = innermost_sampler(batches)
    if isinstance(dataloader.dataset, IterableDataset):
        return _stream(dataloader, sharing)
    if isinstance(sampler, DistributedEvalSampler) and not sharing.dispatch_batches:
        return _evaluation_shards(dataloader, batches)
    if isinstance(sampler, (DistributedSampler, DistributedEvalSampler)) and sharing.num_processes > 1:
        raise ValueError("preparing a loader with a DistributedSampler would shard the data twice: leave it out")
    if sharing.dispatch_batches:
        return _Source(dataloader.dataset, _sampling(dataloader, AllBatches(batches)))
    return _sharded_batches(dataloader, batches, sharing, use_seedable_sampler)


def _stream(dataloader: DataLoader, sharing: _Sharing) -> _Source:
    stream: Any = dataloader.dataset
    sampling = {"batch_size": dataloader.batch_size, "drop_last": dataloader.drop_last}
    if sharing.num_processes == 1 or sharing.dispatch_batches:
        return _Source(_with_epoch_in_workers(stream, dataloader), sampling)
    shard = CountedShard(
        stream,
        batch_size=dataloader.batch_size or 1,
        drop_last=dataloader.drop_last,
        num_processes=sharing.num_processes,
        process_index=sharing.process_index,
        split_batches=sharing.split_batches,
        even_batches=sharing.even_batches,
    )
    if dataloader.batch_size is not None:
        sampling["batch_size"] = shard.samples_per_step
    return _Source(
        dataset=_with_epoch_in_workers(shard, dataloader),
        sampling=sampling,
        synchronized_generator=generator_of(stream),
        other={"collate_fn": CountedCollate(dataloader.collate_fn)},
    )


def _with_epoch_in_workers(stream: Any, dataloader: DataLoader) -> Any:
    """`stream` itself or, if it has a `set_epoch` and its workers stay alive, a stream that calls it there too."""
    if dataloader.persistent_workers and hasattr(stream, "set_epoch"):
        return EpochInWorkers(stream)
    return stream


def _evaluation_shards(dataloader: DataLoader, batches: Any) -> _Source:
    if dataloader.batch_size is None:
        raise ValueError("a loader with a DistributedEvalSampler needs a batch size")
    sampling = _sampling(dataloader, EvalBatches(batches))
    collate_fn = _EmptyBatchCollate(dataloader.dataset, dataloader.collate_fn)
    return _Source(dataloader.dataset, sampling, other={"collate_fn": collate_fn})


def _sharded_batches(dataloader: DataLoader, batches: Any, sharing: _Sharing, use_seedable_sampler: bool) -> _Source:
    if dataloader.batch_sampler is None and not isinstance(batches, BatchSampler):
        sampler = batches
        shards: ReplayableBatches = SampleShard(
            batches, sharing.num_processes, sharing.process_index, sharing.even_batches
        )
    else:
        # As in the original, a sampler under two batch samplers gets no generator.
        sampler = getattr(batches, "sampler", None)
        shards = BatchSamplerShard(
            batches, sharing.num_processes, sharing.process_index, sharing.split_batches, sharing.even_batches
        )
    synchronized_generator = None
    if sharing.num_processes > 1 and not use_seedable_sampler:
        synchronized_generator = _give_generator(sampler)
    return _Source(dataloader.dataset, _sampling(dataloader, shards), synchronized_generator)


def _give_generator(sampler: Any) -> torch.Generator | None:
    """The generator of `sampler`: where it can have one and has none, a new one that is seeded from torch's."""
    if not hasattr(sampler, "generator"):
        return None
    if sampler.generator is None:
        sampler.generator = torch.Generator()
        seed = torch.empty((), dtype=torch.int64).random_()
        sampler.generator.manual_seed(int(seed))
    return generator_of(sampler)


def _sampling(dataloader: DataLoader, shards: Any) -> dict[str, Any]:
    """The arguments with which a loader like `dataloader` draws from `shards`.

    These are ReplayableBatches, except where a script made a DataLoaderShard itself, whose batch sampler may be any.
    """
    if dataloader.batch_sampler is None:
        return {"sampler": shards, "batch_size": None}
    if isinstance(shards, ReplayableBatches) and shards.takes_all:
        # As in the original, the loader has the script's own batch sampler, to read and to change.
        return {"batch_sampler": shards.batch_sampler, "shards": shards}
    return {"batch_sampler": shards}


def _synchronizable(rng_types: list[str] | None, generator: torch.Generator | None) -> list[str] | None:
    if rng_types is None or generator is not None:
        return rng_types
    return [kind for kind in rng_types if kind != "generator"]


_LOADING_OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
)


def _loading_options(dataloader: DataLoader) -> dict[str, Any]:
    """How `dataloader` loads, as arguments for another loader; what it loads is left out."""
    return {name: getattr(dataloader, name) for name in _LOADING_OPTIONS}


def skip_first_batches(dataloader: DataLoader, num_batches: int = 0) -> DataLoader:
    """A loader like `dataloader` that leaves out the first `num_batches` batches of every epoch.

    If `dataloader` is prepared, the new loader begins in the same epoch. If a checkpoint made `dataloader` resume in
    the middle of an epoch, `num_batches` replaces that position; it counts from the start of the epoch.
    """
    loading = _loading_options(dataloader)
    if isinstance(dataloader.dataset, IterableDataset):
        loading["batch_size"] = dataloader.batch_size
        loading["drop_last"] = dataloader.drop_last
    if isinstance(dataloader, DataLoaderShard):
        return _skip_prepared(dataloader, num_batches, loading)
    if isinstance(dataloader.dataset, IterableDataset):
        return SkipDataLoader(dataloader.dataset, num_batches, **loading)
    batches = SkipBatchSampler(batches_of(dataloader), num_batches)
    if dataloader.batch_sampler is None:
        return DataLoader(dataloader.dataset, sampler=batches, batch_size=None, **loading)
    return DataLoader(dataloader.dataset, batch_sampler=batches, **loading)


def _skip_prepared(dataloader: DataLoaderShard, num_batches: int, loading: dict[str, Any]) -> DataLoaderShard:
    if not isinstance(dataloader.dataset, IterableDataset):
        loading |= _sampling(dataloader, dataloader.shards)
    loading |= {
        "skip_batches": dataloader.skip_batches + num_batches,
        "device": dataloader.device,
        "iteration": dataloader.iteration,
        "position": dataloader._position,
        "_drop_last": dataloader._drop_last,
        "_non_blocking": dataloader._non_blocking,
    }
    if isinstance(dataloader, DataLoaderDispatcher):
        return DataLoaderDispatcher(
            dataloader.dataset, dataloader.split_batches, slice_fn=dataloader.slice_fn, **loading
        )
    if isinstance(dataloader, SkipDataLoader):
        return SkipDataLoader(dataloader.dataset, **loading)
    return DataLoaderShard(
        dataloader.dataset,
        rng_types=dataloader.rng_types,
        synchronized_generator=dataloader.synchronized_generator,
        **loading,
    )
