"""The loader of one process: its share of the batches, on its device, and what is known of each of them."""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from .logging import get_logger
from .operations import send_to_device
from .position import DrawnBatches, LastYielded, Pass, Progress, SavedContent, put_back, restored_generators
from .sampler import (
    BatchSamplerShard,
    SeedableRandomSampler,
    ShortStep,
    Step,
    follows_from_epoch,
    generator_of,
    innermost_sampler,
    sampler_chain,
    set_state,
    state_of,
)
from .state import GradientState, PartialState
from .streams import StreamShard, collate_step
from .utils.random import synchronize_rng_states

logger = get_logger(__name__)

ORDER_IS_LOST = (
    "the order of the interrupted epoch is lost: in DataLoaderConfiguration, use_seedable_sampler=True "
    "makes it a function of the epoch, and use_stateful_dataloader=True keeps it in the checkpoint"
)
# How a loader loads, as arguments for another one. What it loads is not among them.
LOADING_OPTIONS = (
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


class DataLoaderShard(DataLoader):
    """A DataLoader for one process of several: on the right device, and aware of its end.

    A pass that comes to its end moves on to the next epoch; after a `break` the same epoch is visited again, by
    samplers and data sets that have `set_epoch`.

    One batch is read ahead, as in the original: so the last one is known. When a batch is yielded, data set and
    collator have drawn their random numbers for the next one too.

    Args:
        dataset, kwargs: of DataLoader.
        device: where the batches go; None leaves them.
        rng_types: generators that all processes take over from rank 0 at the start of every pass: "torch", "cuda", or
            "generator" for `synchronized_generator`.
        synchronized_generator: the sampler's or the data set's.
        skip_batches: steps to leave out at the beginning of every epoch.
        use_stateful_dataloader: checkpoints hold the position, see `position.py`.
    """

    batches_per_step = 1  # of the script's loader

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
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, **kwargs)
        self.device = device
        self.rng_types = rng_types
        self.synchronized_generator = synchronized_generator
        self.skip_batches = skip_batches
        self.use_stateful_dataloader = use_stateful_dataloader
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking
        self._progress = Progress()
        self._reader: DataLoader | None = None  # where workers stay alive from pass to pass

    # A pass

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # DataLoader names a class of its own
        progress = self._progress
        this_pass = progress.begin_pass(self.skip_batches)
        self.gradient_state._add_dataloader(self)
        try:
            reading = self._begin_reading(this_pass)
            for batch, last_yielded in self._steps(reading, this_pass):
                progress.make_current(this_pass)
                this_pass.step += 1
                this_pass.last_yielded = last_yielded
                yield batch
        finally:
            progress.passes.remove(this_pass)
            self.gradient_state._remove_dataloader(self)
        if this_pass.step > 0:  # as in the original, a pass without batches is no epoch
            progress.epoch += 1

    def _begin_reading(self, this_pass: Pass) -> Iterator[Step]:
        """The steps from where the pass begins, each read when it is asked for."""
        with self._generators_to_restore(this_pass):
            if self.rng_types:
                synchronize_rng_states(self.rng_types, self.synchronized_generator)
            self.set_epoch(this_pass.epoch)
            reading = self._read(this_pass)
            if isinstance(self.dataset, IterableDataset):
                # A stream is always read from its first batch.
                reading = islice(reading, this_pass.step, None)
            if this_pass.saved is not None:
                # Most samplers draw the order when the first batch is asked for, so it is asked for here.
                reading = _read_first_again(reading, this_pass.saved.read_ahead)
                this_pass.saved = None
        return reading

    def _generators_to_restore(self, this_pass: Pass) -> AbstractContextManager:
        """The context to begin reading in. It restores the generators where this draws what was drawn before.

        When torch begins to read, it draws a seed, and some samplers draw the order:

            a pass that follows no checkpoint, or begins an epoch    draws anew: nothing is restored
            goes on from a position in the checkpoint                draws the same again: restored
            skips after loading, a stream or an order of the epoch   draws the same again: restored
            skips after loading, another order                       draws another epoch, as in the original
        """
        if not this_pass.was_interrupted:
            return nullcontext()
        is_stream = isinstance(self.dataset, IterableDataset)
        if this_pass.saved is not None or is_stream or follows_from_epoch(index_sampler_of(self)):
            return restored_generators(self.device, self._order_sampler, self.generator)
        logger.warning(ORDER_IS_LOST)
        return nullcontext()

    def _read(self, this_pass: Pass) -> Iterator[Step]:
        """The steps that this process reads, from where the pass begins; of a stream all steps."""
        # Torch's iterator draws a seed when it is made: that is before the first batch is asked for.
        return _join_short_steps(self._iterator_of_torch(this_pass), this_pass)

    def _iterator_of_torch(self, this_pass: Pass) -> Iterator[Any]:
        reader = self._reader
        if reader is None:
            reader = self._make_reader()
        if self.persistent_workers:
            self._reader = reader
        index_sampler = index_sampler_of(reader)
        if isinstance(index_sampler, DrawnBatches):
            index_sampler.read_next(this_pass)
        return iter(reader)

    def _make_reader(self) -> DataLoader:
        """Torch's own loader, which reads for this one."""
        index_sampler = None
        if not isinstance(self.dataset, IterableDataset):
            batches = index_sampler_of(self)
            index_sampler = DrawnBatches(batches, self.batches_per_step, self.use_stateful_dataloader)
        arguments = loading_arguments(self, index_sampler)
        if isinstance(self.dataset, StreamShard):  # makes the batches itself
            arguments |= {"batch_size": None, "drop_last": False, "collate_fn": partial(collate_step, self.collate_fn)}
        return DataLoader(self.dataset, **arguments)

    def _steps(self, reading: Iterator[Step], this_pass: Pass) -> Iterator[tuple[Any, LastYielded]]:
        """The batches of a pass on the device, each with what is known of it."""
        remainder = self._count_remainder()
        following = next(reading, None)
        while following is not None:
            batch, short_step = following
            if self.device is not None:
                batch = send_to_device(batch, self.device, self._non_blocking)
            following = next(reading, None)
            this_pass.read_ahead = None if following is None else following.content
            yield batch, LastYielded(following is None, remainder, short_step)

    def _count_remainder(self) -> int:
        if self._drop_last:
            return -1
        try:
            return self.total_dataset_length % self.total_batch_size
        except Exception:  # as in the original: a data set without a length may raise anything
            return -1

    # What is known of the batch that was yielded last

    @property
    def gradient_state(self) -> GradientState:
        """That of the process."""
        return GradientState()

    @property
    def end_of_dataloader(self) -> bool:
        """True if the batch just yielded is the last."""
        return self._progress.current.last_yielded.end_of_dataloader

    @property
    def remainder(self) -> int:
        """Samples of all processes in the last step, -1 where it is not known. For a full one it is 0.

        If the loader is dispatched and has yielded a full last step, it is the number of all samples in that step.
        It is there for scripts that read it. `gather_for_metrics` goes by `short_step`.
        """
        return self._progress.current.last_yielded.remainder

    @property
    def short_step(self) -> ShortStep | None:
        """A ShortStep where some process lacks samples of its own in this step, else None."""
        return self._progress.current.last_yielded.short_step

    # Where the next pass goes on

    @property
    def iteration(self) -> int:
        """The epoch that the next pass visits."""
        return self._progress.epoch

    @iteration.setter
    def iteration(self, epoch: int) -> None:
        self._progress.epoch = epoch

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass visit `epoch`; where a loaded checkpoint stopped in that epoch, it continues there."""
        self.iteration = epoch
        parts: list[Any] = [self.dataset]
        if not isinstance(self.dataset, IterableDataset):
            parts += sampler_chain(index_sampler_of(self))
        for part in parts:
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    def without_first(self, num_batches: int) -> "DataLoaderShard":
        """This loader without the first `num_batches` steps of an epoch. Both have the same epoch."""
        rest = copy.copy(self)
        rest.skip_batches += num_batches
        rest._progress = self._progress
        return rest

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of this loader: by default seed and epoch of a SeedableRandomSampler, if it has one.

        With `use_stateful_dataloader` it holds the position, the batch that this process has read ahead, and the states
        of the generators. Outside of a loop, also after a `break`, the position is the beginning of the epoch.
        """
        sampler = self._order_sampler
        current = self._progress.current
        seed = sampler.initial_seed if isinstance(sampler, SeedableRandomSampler) else None
        if not self.use_stateful_dataloader:
            return {} if seed is None else {"epoch": current.epoch + self.end_of_dataloader, "sampler_seed": seed}
        content = current.content_to_save()
        return {
            "epoch": current.epoch,
            "step": current.step,
            "is_over": self.end_of_dataloader,
            "drawn_from": current.drawn_from,
            "first_rows": content.first_rows,
            "read_ahead": content.read_ahead,
            "process": self._own_process,
            "step_size": self.total_batch_size,
            "sampler_seed": seed,
            "sampler_generator": state_of(generator_of(sampler)),
            "loader_generator": state_of(self.generator),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next pass follow a checkpoint. A loader of which the checkpoint holds nothing gets `{}`.

        By default the next pass visits the whole epoch. With `use_stateful_dataloader` it continues in the middle, on
        any number of processes with the same samples per step. A checkpoint at the last step of an epoch is followed by
        the next epoch, as in the original; after `set_epoch` with the number of the finished one no batch is left.

        Raises:
            ValueError: if the samples yielded before are no whole number of this loader's steps.
        """
        self._progress.is_loaded = True
        if not state_dict:
            return
        sampler = self._order_sampler
        if isinstance(sampler, SeedableRandomSampler):
            sampler.initial_seed = state_dict["sampler_seed"]
        if self.use_stateful_dataloader:
            self._load_position(state_dict)
            self._load_generators(state_dict)
        else:
            self.set_epoch(state_dict["epoch"])

    def _load_position(self, state: dict[str, Any]) -> None:
        epoch = state["epoch"]
        samples = state["step"] * state["step_size"]
        step_size = self.total_batch_size
        step, rest = divmod(samples, step_size)
        if rest:
            raise ValueError(f"{samples} samples of epoch {epoch} are no whole number of steps of {step_size}")
        has_own_batch = (state["process"], state["step_size"]) == (self._own_process, step_size)
        saved = SavedContent(state["read_ahead"] if has_own_batch else None, state["first_rows"])
        last_yielded = LastYielded(end_of_dataloader=state["is_over"])
        resumed = Pass(epoch, step, saved=saved, drawn_from=state["drawn_from"], last_yielded=last_yielded)
        self._progress.epoch = epoch + state["is_over"]
        self._progress.resumed = resumed if step > 0 else None

    def _load_generators(self, state: dict[str, Any]) -> None:
        sampler = self._order_sampler
        saved = state["sampler_generator"]
        # A sampler that has none on a single process was given one where the checkpoint's run had several.
        if saved is not None and hasattr(sampler, "generator") and sampler.generator is None:
            sampler.generator = torch.Generator()
        set_state(generator_of(sampler), saved)
        set_state(self.generator, state["loader_generator"])

    @property
    def _own_process(self) -> tuple[int, int]:
        """The process whose batches these are, and the number of processes that share them."""
        shard: Any = PartialState() if self._shard is None else self._shard
        return shard.process_index, shard.num_processes

    def __getstate__(self) -> dict[str, Any]:
        # A copy is outside of the loops over this loader.
        return vars(self) | {"_reader": None, "_progress": Progress(self.iteration)}

    # Samplers and sizes

    def get_sampler(self) -> Any:
        """See the function `get_sampler`."""
        return get_sampler(self)

    @property
    def _order_sampler(self) -> Any:
        """The sampler that draws the order; for a stream one of torch's, which draws nothing."""
        return innermost_sampler(index_sampler_of(self))

    def __len__(self) -> int:
        """Batches in an epoch on this process, without those that are skipped."""
        return max(0, super().__len__() - self.skip_batches)

    @property
    def _shard(self) -> BatchSamplerShard | None:
        """What deals out the data among processes; None where a loader reads all of them."""
        source = self.dataset.shard if isinstance(self.dataset, StreamShard) else index_sampler_of(self)
        return source if isinstance(source, BatchSamplerShard) else None

    @property
    def total_batch_size(self) -> int:
        """Samples of a full step over all processes; batches, where the data come without a batch size."""
        shard = self._shard
        source = index_sampler_of(self) if shard is None else shard
        size = getattr(source, "batch_size", None) or self.batch_size or 1
        if shard is None or shard.split_batches:
            return size
        return size * shard.num_processes

    @property
    def total_dataset_length(self) -> int:
        """Samples in the whole data set."""
        dataset: Any = self.dataset
        if isinstance(dataset, StreamShard):
            dataset = dataset.dataset
        return dataset.total_length if hasattr(dataset, "total_length") else len(dataset)


def _read_first_again(reading: Iterator[Step], content: list | None) -> Iterator[Step]:
    """`reading`, of which the first step is read now, with the content that a checkpoint has of it."""
    first = next(reading, None)
    if first is None:
        return reading
    return chain([Step(put_back(content, first.content), first.short_step)], reading)


def _join_short_steps(batches: Iterator[Any], this_pass: Pass) -> Iterator[Step]:
    """The `batches` of torch's loader, each with its ShortStep. Those of a StreamShard come with theirs."""
    for batch in batches:
        if isinstance(batch, Step):
            yield batch
        else:
            short_step = this_pass.short_steps.popleft() if this_pass.short_steps else None
            yield Step(batch, short_step)


def loading_arguments(dataloader: DataLoader, index_sampler: Any) -> dict[str, Any]:
    """The arguments for a loader that reads as `dataloader` does, by `index_sampler` where it is not of a stream."""
    arguments = {name: getattr(dataloader, name) for name in LOADING_OPTIONS}
    if isinstance(dataloader.dataset, IterableDataset):
        arguments["batch_size"] = dataloader.batch_size
        arguments["drop_last"] = dataloader.drop_last
    elif dataloader.batch_sampler is None:
        arguments["sampler"] = index_sampler
        arguments["batch_size"] = None
    else:
        arguments["batch_sampler"] = index_sampler
    return arguments


def index_sampler_of(dataloader: DataLoader) -> Any:
    """The sampler that the loader reads by: the batch sampler or, in a loader with `batch_size=None`, the sampler."""
    return dataloader.sampler if dataloader.batch_sampler is None else dataloader.batch_sampler


def get_sampler(dataloader: DataLoader) -> Any:
    """The sampler that draws the numbers for the batch sampler of `dataloader`; None where there is no such thing."""
    index_sampler = index_sampler_of(dataloader)
    if isinstance(index_sampler, BatchSamplerShard):
        index_sampler = index_sampler.batch_sampler
    return getattr(index_sampler, "sampler", None)
