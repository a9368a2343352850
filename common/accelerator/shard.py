"""The loader of one process: its share of the batches, on its device, and what is known of each of them."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from .operations import send_to_device
from .sampler import (
    BatchSamplerShard,
    DrawnBatches,
    ShortStep,
    SkipBatchSampler,
    Tagged,
    follows_from_epoch,
    sampler_chain,
    shard_among,
)
from .state import GradientState, PartialState
from .streams import StreamShard, collate_tagged
from .utils.random import synchronize_rng_states

logger = logging.getLogger(__name__)

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


@dataclass(eq=False)
class Pass:
    """One `for` over a loader, from its beginning to its end: what is known of the batch that was yielded last.

    Attributes:
        step: steps of the epoch that were yielded, or left out at the start by `skip_first_batches` or a resumed run.
        end_of_dataloader, remainder, short_step: see the properties of the loader, which read them.
    """

    epoch: int
    step: int = 0
    end_of_dataloader: bool = False
    remainder: int = -1
    short_step: ShortStep | None = None


class PassStack(list[Any]):
    """The passes over a loader that have begun and not ended, those over what `skip_first_batches` made of it too.

    A script may begin a pass within another one over the same loader. The one that yields a batch moves to the top.
    """

    @property
    def top(self) -> Any:
        """The Pass that yielded a batch last; None outside of a loop."""
        return self[-1] if self else None

    def move_to_top(self, yielding: Pass) -> None:
        if self[-1] is not yielding:
            self.remove(yielding)
            self.append(yielding)


class DataLoaderShard(DataLoader):
    """A DataLoader for one process of several: on the right device, and aware of its end.

    `iteration` is the number of the epoch that the next pass visits. A pass that comes to its end moves on to the
    next epoch; after a `break` the same epoch is visited again, by samplers and data sets that have `set_epoch`. What
    `skip_first_batches` makes of a loader visits the rest of an epoch, and at its end moves that loader on too.

    One batch is read ahead, as in the original: so the last one is known. When a batch is yielded, data set and
    collator have drawn their random numbers for the next one too.

    Args:
        dataset, kwargs: of DataLoader.
        device: where the batches go; None leaves them.
        rng_types: generators that all processes take over from rank 0 at the start of every pass: "torch", "cuda", or
            "generator" for `synchronized_generator`.
        synchronized_generator: the sampler's or the data set's.
        skip_batches: steps to leave out in every pass, after they were read. Of a data set with a sampler they are
            not read: a SkipBatchSampler leaves them out.
        iteration: the epoch of the first pass.
        skipped_from: the loader of which this one visits the rest of an epoch, if `skip_first_batches` made it.
        first_step: how many steps of the epoch this loader leaves out, read or not.
    """

    batches_per_step = 1  # of the script's loader

    def __init__(
        self,
        dataset: Any,
        device: torch.device | None = None,
        rng_types: list[str] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        iteration: int = 0,
        skipped_from: "DataLoaderShard | None" = None,
        first_step: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, **kwargs)
        self.device = device
        self.rng_types = rng_types
        self.synchronized_generator = synchronized_generator
        self.skip_batches = skip_batches
        self.iteration = iteration
        self.rng_state_after_load: torch.Tensor | None = None  # torch's generator as the last `load_state` left it
        self._skipped_from = skipped_from
        self._first_step = first_step
        self._passes: PassStack = PassStack() if skipped_from is None else skipped_from._passes
        self._reader: DataLoader | None = None  # where workers stay alive from pass to pass
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # DataLoader names a class of its own
        this_pass = self._new_pass()
        self._passes.append(this_pass)
        self.gradient_state._add_dataloader(self)
        try:
            reading = self._begin_reading(this_pass)
            for number, batch in enumerate(self._steps(reading, this_pass)):
                self._passes.move_to_top(this_pass)
                if number >= self.skip_batches:
                    this_pass.step += 1
                    yield batch
        finally:
            self._passes.remove(this_pass)
            self.gradient_state._remove_dataloader(self)
        if this_pass.step > 0:  # as in the original, a pass without batches is no epoch
            epoch = self.iteration
            self.iteration = epoch + 1
            if self._origin.iteration == epoch:  # else the script has meanwhile sent it to another epoch
                self._origin.iteration = epoch + 1

    @property
    def _origin(self) -> Any:
        """The loader that `skip_first_batches` was given, if that made this one; else this one itself."""
        return self if self._skipped_from is None else self._skipped_from

    def _new_pass(self) -> Pass:
        return Pass(self.iteration, self._first_step)

    def _begin_reading(self, this_pass: Pass) -> Iterator[Tagged]:
        """The batches of one step after the other, each read when it is asked for.

        When torch begins to read, it draws a seed, and some samplers draw the order. These draws
        - are undone in the rest of an epoch that a checkpoint interrupted: they were made before the checkpoint,
        - stay there too if the order cannot be drawn again, as in the original, with a warning,
        - stay in any other pass.
        """
        after_load = self._origin.rng_state_after_load
        # A pass that draws from a generator of its own, or from workers that stay, leaves the state equal. There is
        # nothing to undo then.
        is_unchanged_since_load = after_load is not None and torch.equal(after_load, torch.get_rng_state())
        is_interrupted = is_unchanged_since_load and self._first_step > 0
        can_repeat_order = isinstance(self.dataset, IterableDataset) or follows_from_epoch(index_sampler_of(self))
        if is_interrupted and not can_repeat_order and PartialState().is_main_process:
            logger.warning(
                "the order of the interrupted epoch is lost: in DataLoaderConfiguration, use_seedable_sampler=True "
                "makes it a function of the epoch, and use_stateful_dataloader=True keeps it in the checkpoint"
            )
        is_on_gpu = self.device is not None and self.device.type == "cuda"
        with torch.random.fork_rng([self.device] if is_on_gpu else [], enabled=is_interrupted and can_repeat_order):
            return self._begin_epoch()

    def _begin_epoch(self) -> Iterator[Tagged]:
        if self.rng_types:
            synchronize_rng_states(self.rng_types, self.synchronized_generator)
        self.set_epoch(self.iteration)
        return self._read()

    def _read(self) -> Iterator[Tagged]:
        reader = self._reader
        if reader is None:
            reader = self._make_reader()
        if self.persistent_workers:
            self._reader = reader
        # Making torch's iterator draws a seed for the workers, so it is made before the first batch is asked for.
        return _with_short_steps(iter(reader), index_sampler_of(reader))

    def _make_reader(self) -> DataLoader:
        """Torch's own loader, which reads for this one."""
        index_sampler = None
        if not isinstance(self.dataset, IterableDataset):
            index_sampler = self._drawn_batches()
        arguments = loading_arguments(self, index_sampler)
        if isinstance(self.dataset, StreamShard):
            arguments["collate_fn"] = partial(collate_tagged, self.collate_fn)
        return DataLoader(self.dataset, **arguments)

    def _drawn_batches(self) -> DrawnBatches:
        return DrawnBatches(index_sampler_of(self), self._is_unsharded)

    @property
    def _is_unsharded(self) -> bool:
        """True where this process gets all batches of a batch sampler: no BatchSamplerShard has shared them out."""
        return makes_batches(self) and self._shard is None

    def _steps(self, reading: Iterator[Tagged], this_pass: Pass) -> Iterator[Any]:
        """The batches of a pass on the device. Right before each is yielded, `this_pass` learns what is known of it."""
        remainder = self._count_remainder()
        following = next(reading, None)
        while following is not None:
            batch, short_step = following
            if self.device is not None:
                batch = send_to_device(batch, self.device, self._non_blocking)
            following = next(reading, None)
            this_pass.end_of_dataloader = following is None
            this_pass.remainder = remainder
            this_pass.short_step = short_step
            yield batch

    def _count_remainder(self) -> int:
        if self._drop_last:
            return -1
        try:
            return self.total_dataset_length % self.total_batch_size
        except Exception:  # as in the original: a data set without a length may raise anything
            return -1

    @property
    def gradient_state(self) -> GradientState:
        """That of the process."""
        return GradientState()

    @property
    def _current_pass(self) -> Pass:
        """The pass that yielded a batch last; outside of a loop one that has not begun."""
        return self._passes.top or Pass(self.iteration)

    @property
    def end_of_dataloader(self) -> bool:
        """True if the batch just yielded is the last."""
        return self._current_pass.end_of_dataloader

    @property
    def remainder(self) -> int:
        """Samples of all processes in the last step, -1 where it is not known; in a full one 0 or, dispatched, all.

        It is there for scripts that read it. `gather_for_metrics` goes by `short_step`.
        """
        return self._current_pass.remainder

    @property
    def short_step(self) -> ShortStep | None:
        """A ShortStep where some process lacks samples of its own in this step, else None."""
        return self._current_pass.short_step

    def arguments_to_skip(self, num_batches: int) -> dict[str, Any]:
        """The arguments for a loader like this one that leaves out `num_batches` steps more."""
        rest = None
        num_to_read = num_batches  # before the first batch of a stream
        if not isinstance(self.dataset, IterableDataset):
            rest = SkipBatchSampler(index_sampler_of(self), num_batches * self.batches_per_step)
            num_to_read = 0
        return loading_arguments(self, rest) | {
            "device": self.device,
            "rng_types": self.rng_types,
            "synchronized_generator": self.synchronized_generator,
            "skip_batches": self.skip_batches + num_to_read,
            "iteration": self.iteration,
            "_drop_last": self._drop_last,
            "_non_blocking": self._non_blocking,
            "skipped_from": self._origin,
            "first_step": self._first_step + num_batches,
        }

    @property
    def epoch_of_next_step(self) -> int:
        """The epoch to go on in after the step that is being worked on."""
        current = self._current_pass
        return current.epoch + current.end_of_dataloader

    def get_sampler(self) -> Any:
        """See the function `get_sampler`."""
        return get_sampler(self)

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass visit `epoch`."""
        self.iteration = epoch
        parts: list[Any] = [self.dataset]
        if not isinstance(self.dataset, IterableDataset):
            parts += sampler_chain(index_sampler_of(self))
        for part in parts:
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    def __len__(self) -> int:
        """Batches in an epoch on this process, without those that are skipped."""
        return max(0, super().__len__() - self.skip_batches)

    @property
    def _shard(self) -> BatchSamplerShard | None:
        """What deals out the data among processes; None where a loader reads all of them."""
        if isinstance(self.dataset, IterableDataset):
            return self.dataset.shard if isinstance(self.dataset, StreamShard) else None
        return shard_among(index_sampler_of(self))

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

    def __getstate__(self) -> dict[str, Any]:
        # A copy is outside of the loops over this loader, and is nobody's rest.
        kept = dict(vars(self))
        kept["_reader"] = None
        kept["_passes"] = PassStack()
        kept["_skipped_from"] = None
        return kept


class SkipDataLoader(DataLoaderShard):
    """A loader of a stream that skips the first `skip_batches` batches; `skip_first_batches` makes it."""

    def _steps(self, reading: Iterator[Tagged], this_pass: Pass) -> Iterator[Any]:
        """As in the original, nothing is read ahead here, so no batch is known to be the last."""
        for batch in reading:
            yield batch.content

    def set_epoch(self, epoch: int) -> None:
        """Remember `epoch`. The data set was not prepared, and its epoch is the script's to choose."""
        self.iteration = epoch


def _with_short_steps(batches: Iterator[Any], drawn: Any) -> Iterator[Tagged]:
    """The `batches` of a loader, whose sample numbers are those of `drawn` if they have any."""
    for batch in batches:
        if isinstance(drawn, DrawnBatches):
            yield Tagged(batch, drawn.short_steps.popleft())
        elif isinstance(batch, Tagged):
            yield batch
        else:
            yield Tagged(batch, None)


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


def makes_batches(dataloader: DataLoader) -> bool:
    """True where the loader reads batches of sample numbers; with `batch_size=None` it may read single ones."""
    index_sampler = index_sampler_of(dataloader)
    while isinstance(index_sampler, SkipBatchSampler):  # what it skips may be single numbers too
        index_sampler = index_sampler.batch_sampler
    return dataloader.batch_sampler is not None or isinstance(index_sampler, BatchSampler)


def get_sampler(dataloader: DataLoader) -> Any:
    """The sampler that draws the numbers for the batch sampler of `dataloader`; None where there is no such thing."""
    index_sampler = index_sampler_of(dataloader)
    if isinstance(index_sampler, BatchSamplerShard):
        index_sampler = index_sampler.batch_sampler
    return getattr(index_sampler, "sampler", None)
