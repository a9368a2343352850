"""The loader of one process: its share of the batches, on its device, and what is known of each of them."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from .operations import send_to_device
from .sampler import (
    BatchSamplerShard,
    Counted,
    DrawnBatches,
    PartialStep,
    SkipBatchSampler,
    follows_from_epoch,
    innermost_sampler,
    sampler_chain,
    shard_among,
)
from .state import GradientState, PartialState
from .streams import CountedCollate, CountedShard
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


class StepState(NamedTuple):
    """The facts about a step while the script works on its batch: see the properties of DataLoaderShard."""

    end_of_dataloader: bool = False
    remainder: int = -1
    partial_step: PartialStep | None = None


@dataclass(eq=False)
class Pass:
    """A `for` over a loader that has begun and not ended.

    Attributes:
        is_rest: it visits what is left of the epoch, which may be nothing.
        step: how many steps were yielded or, by `skip_first_batches` or a resumed run, left out at the start.
        state: the facts about the step whose batch it yielded last.
    """

    epoch: int
    is_rest: bool
    step: int = 0
    state: StepState = field(default_factory=StepState)


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
        skip_batches: steps to skip in every pass, after they were read. Of a data set with a sampler, a
            SkipBatchSampler leaves them out unread.
        iteration: the epoch of the first pass.
        skipped_from: the loader of which this one visits the rest of an epoch, if `skip_first_batches` made it.
        rng_state_at_checkpoint: torch's generator as `load_state` left it, for a loader of the rest of an epoch.

    Attributes:
        rng_state_after_load: torch's generator as the last `load_state` left it; None before.
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
        rng_state_at_checkpoint: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, **kwargs)
        self.device = device
        self.rng_types = rng_types
        self.synchronized_generator = synchronized_generator
        self.skip_batches = skip_batches
        self.iteration = iteration
        self.rng_state_after_load: torch.Tensor | None = None
        self._skipped_from = skipped_from
        # Those over what `skip_first_batches` made of this loader too. The one that yielded a batch last is the last.
        self._passes: list[Any] = [] if skipped_from is None else skipped_from._passes
        self._reader: DataLoader | None = None  # where workers stay alive from pass to pass
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking
        self._rng_state_at_checkpoint = rng_state_at_checkpoint

    @property
    def gradient_state(self) -> GradientState:
        """That of the process."""
        return GradientState()

    @property
    def step_state(self) -> StepState:
        """The facts about the batch that this loader yielded last; outside of a loop those of no batch."""
        return self._passes[-1].state if self._passes else StepState()

    @property
    def end_of_dataloader(self) -> bool:
        """True if the batch just yielded is the last."""
        return self.step_state.end_of_dataloader

    @property
    def remainder(self) -> int:
        """Samples of all processes in the last step, 0 if that step is whole, -1 where it is not known.

        In a DataLoaderDispatcher's whole last step it is the number of samples. It is there for scripts that read it:
        `gather_for_metrics` goes by `partial_step`.
        """
        return self.step_state.remainder

    @property
    def partial_step(self) -> PartialStep | None:
        """A PartialStep where some process lacks samples of its own in this step, else None."""
        return self.step_state.partial_step

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # DataLoader names a class of its own
        this_pass = self._new_pass()
        self._passes.append(this_pass)
        self.gradient_state._add_dataloader(self)
        has_steps = False
        try:
            reading = self._begin_reading(this_pass)
            for number, (batch, state) in enumerate(self._steps(reading)):
                has_steps = True
                this_pass.state = state
                # A script may begin a pass within a loop over this very loader. The one that goes on comes last.
                self._passes.remove(this_pass)
                self._passes.append(this_pass)
                if number >= self.skip_batches:
                    this_pass.step += 1
                    yield batch
        finally:
            self._passes.remove(this_pass)
            self.gradient_state._remove_dataloader(self)
        if has_steps or this_pass.is_rest:  # as in the original, a pass without batches is no epoch
            epoch = self.iteration
            self.iteration = epoch + 1
            # Unless the script has meanwhile sent it to another epoch.
            if self._whole.iteration == epoch:
                self._whole.iteration = epoch + 1

    def _new_pass(self) -> Pass:
        return Pass(self.iteration, is_rest=self._skipped_from is not None)

    def _begin_reading(self, this_pass: Pass) -> Iterator[Counted]:
        """The batches of one step after the other, each read when it is asked for.

        If this pass goes on in an epoch that a checkpoint interrupted, torch's generators stay as they are: what is
        drawn at the beginning of the epoch was drawn before the checkpoint already. In an order that nobody can draw
        again a new epoch begins, in effect: then its draws stay, as in the original.
        """
        saved = self._rng_state_at_checkpoint
        # Equal only if nothing was drawn since `load_state`.
        goes_on = saved is not None and torch.equal(saved, torch.get_rng_state())
        if goes_on and not (isinstance(self.dataset, IterableDataset) or follows_from_epoch(index_sampler_of(self))):
            goes_on = False
            if PartialState().is_main_process:
                logger.warning(
                    "the order of the interrupted epoch is lost, because %s draws another one: in "
                    "DataLoaderConfiguration, use_seedable_sampler=True makes the order a function of the epoch, and "
                    "use_stateful_dataloader=True keeps it in the checkpoint",
                    type(innermost_sampler(index_sampler_of(self))).__name__,
                )
        is_on_gpu = self.device is not None and self.device.type == "cuda"
        with torch.random.fork_rng([self.device] if is_on_gpu else [], enabled=goes_on):
            return self._open()

    def _open(self) -> Iterator[Counted]:
        if self.rng_types:
            synchronize_rng_states(self.rng_types, self.synchronized_generator)
        self.set_epoch(self.iteration)
        return self._read()

    def _read(self) -> Iterator[Counted]:
        reader = self._reader
        if reader is None:
            reader = self._make_reader()
        if self.persistent_workers:
            self._reader = reader
        # Making torch's iterator draws a seed for the workers, so it is made before the first batch is asked for.
        return _with_partial_steps(iter(reader), index_sampler_of(reader))

    def _make_reader(self) -> DataLoader:
        """Torch's own loader, which reads for this one."""
        index_sampler = None
        if not isinstance(self.dataset, IterableDataset):
            index_sampler = self._draw_from(index_sampler_of(self))
        arguments = loading_arguments(self, index_sampler)
        if isinstance(self.dataset, CountedShard):
            arguments["collate_fn"] = CountedCollate(self.collate_fn)
        return DataLoader(self.dataset, **arguments)

    def _draw_from(self, index_sampler: Any) -> DrawnBatches:
        return DrawnBatches(index_sampler, self._is_of_one_process(index_sampler))

    def _is_of_one_process(self, index_sampler: Any) -> bool:
        """True where `index_sampler` makes batches, and not those of one of several processes."""
        while isinstance(index_sampler, SkipBatchSampler):
            index_sampler = index_sampler.batch_sampler
        makes_batches = self.batch_sampler is not None or isinstance(index_sampler, BatchSampler)
        return makes_batches and not isinstance(index_sampler, BatchSamplerShard)

    def _steps(self, reading: Iterator[Counted]) -> Iterator[tuple[Any, StepState]]:
        """The batches of a pass on the device, and what is known of each when it is yielded."""
        remainder = self._count_remainder()
        following = next(reading, None)
        while following is not None:
            batch, partial = following
            if self.device is not None:
                batch = send_to_device(batch, self.device, self._non_blocking)
            following = next(reading, None)
            yield batch, StepState(following is None, remainder, partial)

    @property
    def _whole(self) -> Any:
        """The loader that `skip_first_batches` was told; this one, if it did not make this one."""
        return self if self._skipped_from is None else self._skipped_from

    def _count_remainder(self) -> int:
        if self._drop_last:
            return -1
        try:
            return self.total_dataset_length % self.total_batch_size
        except Exception:  # as in the original: a data set without a length may raise anything
            return -1

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
            "skipped_from": self._whole,
            "rng_state_at_checkpoint": self.rng_state_after_load if num_batches else None,
        }

    @property
    def epoch_of_next_step(self) -> int:
        """The epoch to go on in after the step that is being worked on."""
        if not self._passes:
            return self.iteration
        last = self._passes[-1]
        return last.epoch + last.state.end_of_dataloader

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
            return self.dataset.shard if isinstance(self.dataset, CountedShard) else None
        return shard_among(index_sampler_of(self))

    @property
    def total_batch_size(self) -> int:
        """Samples of a whole step over all processes; batches, where the data come without a batch size."""
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
        if isinstance(dataset, CountedShard):
            dataset = dataset.dataset
        return dataset.total_length if hasattr(dataset, "total_length") else len(dataset)

    def __getstate__(self) -> dict[str, Any]:
        kept = dict(vars(self))
        kept["_reader"] = None
        kept["_passes"] = []
        kept["_skipped_from"] = None
        return kept


class SkipDataLoader(DataLoaderShard):
    """A loader of a stream that skips the first `skip_batches` batches; `skip_first_batches` makes it."""

    def _steps(self, reading: Iterator[Counted]) -> Iterator[tuple[Any, StepState]]:
        """As in the original, nothing is read ahead here, so no batch is known to be the last."""
        for batch in reading:
            yield batch.content, StepState()

    def set_epoch(self, epoch: int) -> None:
        """Remember `epoch`. The data set was not prepared, and its epoch is the script's to choose."""
        self.iteration = epoch


def _with_partial_steps(batches: Iterator[Any], drawn: Any) -> Iterator[Counted]:
    """The `batches` of a loader, whose sample numbers are those of `drawn` if they have any."""
    for batch in batches:
        if isinstance(drawn, DrawnBatches):
            yield Counted(batch, drawn.partial_steps.popleft())
        elif isinstance(batch, Counted):
            yield batch
        else:
            yield Counted(batch, None)


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
