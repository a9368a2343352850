"""The loader of one process: its share of the batches, on its device, and what is known of each of them."""

import copy
from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from .logging import get_logger
from .operations import send_to_device
from .position import Pass, Position, Progress, put_back, restored_generators, set_state, state_of
from .sampler import (
    BatchSamplerShard,
    SeedableRandomSampler,
    ShortStep,
    Step,
    follows_from_epoch,
    generator_of,
    innermost_sampler,
    sampler_chain,
    steps_of,
)
from .state import GradientState, PartialState
from .streams import StreamShard, collate_step
from .utils.random import synchronize_rng_states

logger = get_logger(__name__)

ORDER_IS_LOST = (
    "the order of the interrupted epoch is lost: in DataLoaderConfiguration, use_seedable_sampler=True "
    "makes it a function of the epoch, and use_stateful_dataloader=True keeps it in checkpoints made within a loop"
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
    """A DataLoader for one process of several. It puts batches on the device, and knows which one is the last.

    When a pass comes to its end, the next one visits the next epoch. After a `break` the next one visits the same epoch
    again. Samplers and data sets that have `set_epoch` are told the epoch when a pass begins.

    One batch is read ahead, as in the original: so the last one is known. When a batch is yielded, data set and
    collator have drawn their random numbers for the next one too.

    The way from a `for` to its batches, in the order of the calls:

        begin_pass              notes where the pass begins
        _begin_reading          takes over the generators of rank 0, and tells the epoch
        _read                   asks torch's loader for an iterator, which draws its seed; a stream skips steps here
        PassSampler             draws the order, skips steps, and keeps the ShortSteps
        _join_short_steps       gives each batch its ShortStep back

    For the first pass after a checkpoint, `_resume_reading` calls `_begin_reading`. Torch then draws a seed and
    the order again, as the run did before the checkpoint. So the generators go back to where the checkpoint has them.

    Args:
        dataset, kwargs: of DataLoader.
        device: where the batches go; None leaves them.
        rng_types: generators that all processes take over from rank 0 at the start of every pass: "torch", "cuda", or
            "generator" for `synchronized_generator`.
        synchronized_generator: the sampler's or the data set's.
        skip_batches: steps to leave out at the beginning of every epoch.
        use_stateful_dataloader: checkpoints hold the position, see `position.py`.
    """

    # Batches of the script's loader in one step of this loader. DataLoaderDispatcher may have several.
    batches_per_step = 1

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
        # The steps that `skip_first_batches` leaves out of a prepared loader count too.
        self.skipped_steps = skip_batches
        self.use_stateful_dataloader = use_stateful_dataloader
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking
        self._progress = Progress(first_step=skip_batches)
        # Torch's loader, which is kept only if its workers stay alive from pass to pass.
        self._reader: DataLoader | None = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # DataLoader names a class of its own
        progress = self._progress
        this_pass = progress.begin_pass(self.skipped_steps)
        self.gradient_state._add_dataloader(self)
        try:
            reading = self._resume_reading(this_pass) if this_pass.is_resumed else self._begin_reading(this_pass)
            following = next(reading, None)
            while following is not None:
                batch, short_step = following
                if self.device is not None:
                    batch = send_to_device(batch, self.device, self._non_blocking)
                following = next(reading, None)
                this_pass.step += 1
                this_pass.short_step = short_step
                this_pass.end_of_dataloader = following is None
                this_pass.read_ahead = None if following is None else following.content
                progress.passes.remove(this_pass)
                progress.passes.append(this_pass)  # The pass that yields stands last.
                yield batch
        finally:
            progress.passes.remove(this_pass)
            self.gradient_state._remove_dataloader(self)
        if this_pass.step > 0:  # as in the original, a pass without batches is no epoch
            progress.epoch += 1

    def _begin_reading(self, this_pass: Pass) -> Iterator[Step]:
        """The steps of the pass, each read when it is asked for."""
        if self.rng_types:
            synchronize_rng_states(self.rng_types, self.synchronized_generator)
        self.set_epoch(this_pass.start.epoch)
        return self._read(this_pass)

    def _resume_reading(self, this_pass: Pass) -> Iterator[Step]:
        """The steps of the first pass after a checkpoint was loaded, where it begins within an epoch."""
        is_known_order = self._reads_stream or follows_from_epoch(index_sampler_of(self))
        if not is_known_order and not this_pass.has_saved_order:
            # The sampler draws another order, and no generator goes back, as in the original.
            logger.warning(ORDER_IS_LOST)
            return self._begin_reading(this_pass)
        with restored_generators(self.device, self._order_sampler, self.generator):
            reading = self._begin_reading(this_pass)
            if self.use_stateful_dataloader:
                # Most samplers draw the order when the first batch is asked for, so it is asked for here.
                first = next(reading, None)
                if first is not None:
                    first = first._replace(content=put_back(this_pass.start.read_ahead, first.content))
                    reading = chain([first], reading)
        return reading

    def _read(self, this_pass: Pass) -> Iterator[Step]:
        """The steps that this process reads, from where the pass begins."""
        # Torch's iterator draws a seed when it is made: that is before the first batch is asked for.
        batches: Iterator[Any] = iter(self._get_reader())
        if self._reads_stream:
            # A stream is always read from its first batch.
            batches = islice(batches, this_pass.start.step * self.batches_per_step, None)
        return _join_short_steps(batches, this_pass.drawn_short_steps)

    def _get_reader(self) -> DataLoader:
        """Torch's own loader, which reads for this one: a new one for each pass, unless its workers stay alive."""
        if self._reader is not None:
            return self._reader
        index_sampler = None
        if not self._reads_stream:
            batches = index_sampler_of(self)
            index_sampler = PassSampler(batches, self.batches_per_step, self._progress, self.use_stateful_dataloader)
        arguments = loading_arguments(self, index_sampler)
        if isinstance(self.dataset, StreamShard):  # It makes the batches by itself.
            arguments |= {"batch_size": None, "drop_last": False, "collate_fn": partial(collate_step, self.collate_fn)}
        reader = DataLoader(self.dataset, **arguments)
        if self.persistent_workers:
            self._reader = reader
        return reader

    @property
    def gradient_state(self) -> GradientState:
        """That of the process."""
        return GradientState()

    @property
    def end_of_dataloader(self) -> bool:
        """True if the batch just yielded is the last."""
        current = self._progress.current
        return current is not None and current.end_of_dataloader

    @property
    def short_step(self) -> ShortStep | None:
        """A ShortStep where some process lacks samples of its own in this step, else None."""
        current = self._progress.current
        return None if current is None else current.short_step

    @property
    def remainder(self) -> int:
        """Samples of all processes in the last step; 0 for a full one.

        It is -1 outside of a loop, with `drop_last`, and where the length of the data set is not known. It is there
        for scripts that read it. `gather_for_metrics` goes by `short_step`.
        """
        if self._drop_last or self._progress.current is None:
            return -1
        try:
            return self.total_dataset_length % self.total_batch_size
        except (TypeError, NotImplementedError):  # it has no length, or says that it does not know it
            return -1

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
        if not self._reads_stream:
            parts += sampler_chain(index_sampler_of(self))
        for part in parts:
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    def without_first(self, num_batches: int) -> "DataLoaderShard":
        """This loader without the first `num_batches` steps of every epoch. Both have the same epoch."""
        rest = copy.copy(self)
        rest.skipped_steps += num_batches
        rest._progress = self._progress
        return rest

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint: by default seed and epoch of a SeedableRandomSampler, or nothing without one.

        With `use_stateful_dataloader` it holds the position, the batch that this process has read ahead, and the states
        of the generators. Outside of a loop, also after a `break`, the position is the beginning of the epoch.
        """
        sampler = self._order_sampler
        current = self._progress.current
        seed = sampler.initial_seed if isinstance(sampler, SeedableRandomSampler) else None
        if self.use_stateful_dataloader:
            position = self._progress.position()
            return position._asdict() | {
                "process": self._own_process,
                "step_size": self.total_batch_size,
                "sampler_seed": seed,
                "sampler_generator": state_of(generator_of(sampler)),
                "loader_generator": state_of(self.generator),
            }
        if seed is None:
            return {}
        epoch = self.iteration if current is None else current.start.epoch
        return {"epoch": epoch + 1 if self.end_of_dataloader else epoch, "sampler_seed": seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next pass follow a checkpoint. A loader of which the checkpoint holds nothing gets `{}`.

        By default the next pass visits the whole epoch. With `use_stateful_dataloader` it continues in the middle, on
        any number of processes with the same samples per step. A checkpoint at the last step of an epoch is followed by
        the next epoch, as in the original; after `set_epoch` with the number of the finished one no batch is left.

        Raises:
            ValueError: if the samples yielded before are no whole number of this loader's steps.
        """
        self._progress.follows_checkpoint = True
        self._progress.loaded_position = None
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
        position = Position(**{name: state[name] for name in Position._fields})._replace(step=step)
        if (state["process"], state["step_size"]) != (self._own_process, step_size):
            # What was read ahead is a batch of another process, or of another size.
            position = position._replace(read_ahead=None)
        self._progress.loaded_position = position if step > 0 else None
        self.iteration = epoch + 1 if position.is_over else epoch

    def _load_generators(self, state: dict[str, Any]) -> None:
        sampler = self._order_sampler
        saved = state["sampler_generator"]
        # The checkpoint's run had several processes, so `prepare` gave the sampler a generator. On one it gives none.
        if saved is not None and hasattr(sampler, "generator") and sampler.generator is None:
            sampler.generator = torch.Generator()
        set_state(generator_of(sampler), saved)
        set_state(self.generator, state["loader_generator"])

    @property
    def _own_process(self) -> tuple[int, int]:
        """The process whose batches these are, and the number of processes that share them."""
        shard = self._shard
        if shard is not None:
            return shard.process_index, shard.num_processes
        state = PartialState()
        return state.process_index, state.num_processes

    def __getstate__(self) -> dict[str, Any]:
        # A copy is outside of the loops over this loader.
        return vars(self) | {"_reader": None, "_progress": Progress(self.iteration, self._progress.first_step)}

    def get_sampler(self) -> Any:
        """See the function `get_sampler`."""
        return get_sampler(self)

    @property
    def _reads_stream(self) -> bool:
        return isinstance(self.dataset, IterableDataset)

    @property
    def _order_sampler(self) -> Any:
        """The sampler that draws the order; for a stream one of torch's, which draws nothing."""
        return innermost_sampler(index_sampler_of(self))

    def __len__(self) -> int:
        """Batches in an epoch on this process, without those that are skipped."""
        return max(0, super().__len__() - self.skipped_steps)

    @property
    def _shard(self) -> BatchSamplerShard | None:
        """The sampler that deals out the data among processes; None where a loader reads all of them."""
        source = self.dataset.shard if isinstance(self.dataset, StreamShard) else index_sampler_of(self)
        return source if isinstance(source, BatchSamplerShard) else None

    @property
    def total_batch_size(self) -> int:
        """Samples of a full step over all processes. Without a batch size each batch counts as one sample."""
        shard = self._shard
        if shard is None:
            return getattr(index_sampler_of(self), "batch_size", None) or 1
        return (shard.samples_per_process or 1) * shard.num_processes

    @property
    def total_dataset_length(self) -> int:
        """Samples in the whole data set."""
        dataset: Any = self.dataset
        if isinstance(dataset, StreamShard):
            dataset = dataset.dataset
        return dataset.total_length if hasattr(dataset, "total_length") else len(dataset)


class PassSampler:
    """The batch sampler of torch's loader: the batches of the pass that begins, from where it begins.

    Torch calls `iter` when a pass begins; with new workers it calls it twice. Workers that stay alive keep this object
    for all passes, so it finds the pass that begins in the loader's Progress, as the last one. It holds the Progress
    and not the loader, because loader, workers, sampler and loader would be a circle of references. Its workers would
    end only when the garbage collector runs, and torch waits five seconds for each.

    Args:
        batches: a BatchSamplerShard, or what the script reads by: batches of sample numbers, or single numbers.
        batches_per_step: how many of them make a step.
        progress: the loader's.
        is_stateful: checkpoints hold the position, so the order must be drawn from states that are known.
    """

    def __init__(self, batches: Any, batches_per_step: int, progress: Progress, is_stateful: bool) -> None:
        self.batches = batches
        self.batches_per_step = batches_per_step
        self.progress = progress
        self.is_stateful = is_stateful

    def __iter__(self) -> Iterator[Any]:
        # Torch draws its seed after this call, and some samplers draw in `iter`. What is drawn first:
        #     nothing skipped    the order, as in the original
        #     skipped steps      the seed, as in the original
        #     stateful           the seed, because workers that stay alive draw none, and a resumed run draws one
        this_pass = self.progress.passes[-1]
        draws_at_once = not self.is_stateful and this_pass.start.step == 0
        steps = steps_of(self.batches) if draws_at_once else self._draw_later(this_pass)
        return self._remember_short_steps(steps, this_pass)

    def _draw_later(self, this_pass: Pass) -> Iterator[Step]:
        """The steps of an order that is drawn when torch asks for the first batch; if stateful, from known states."""
        if self.is_stateful:
            sampler = innermost_sampler(self.batches)
            generator = generator_of(sampler)
            states_now = torch.get_rng_state(), state_of(generator)
            # An order that was drawn before the checkpoint is drawn again, from the states of that time.
            this_pass.drawn_from = this_pass.start.drawn_from or states_now
            torch_state, sampler_state = this_pass.drawn_from
            torch.set_rng_state(torch_state)
            set_state(generator, sampler_state)
            if sampler_state is None and generator is not None:
                # The one process that drew the order had no generator. `restored_generators` puts this one back.
                sampler.generator = None
        yield from steps_of(self.batches)

    def _remember_short_steps(self, steps: Iterator[Step], this_pass: Pass) -> Iterator[Any]:
        """The batches of the steps, without those that the pass skips. Their ShortSteps are remembered in the pass."""
        for batch, short_step in islice(steps, this_pass.start.step * self.batches_per_step, None):
            this_pass.drawn_short_steps.append(short_step)
            yield batch


def _join_short_steps(batches: Iterator[Any], short_steps: deque[ShortStep | None]) -> Iterator[Step]:
    """The `batches` of torch's loader, which keeps their order, with their ShortSteps. A stream's may have them."""
    for batch in batches:
        if isinstance(batch, Step):
            yield batch
        else:
            yield Step(batch, short_steps.popleft() if short_steps else None)


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
    """The attribute `sampler` of the script's batch sampler; None where there is none.

    This is for scripts. The core asks `innermost_sampler`, which also finds what a batch sampler within another one
    draws from, and the sampler of a loader without batches.
    """
    index_sampler = index_sampler_of(dataloader)
    if isinstance(index_sampler, BatchSamplerShard):
        index_sampler = index_sampler.batch_sampler
    return getattr(index_sampler, "sampler", None)
