"""The loader of one process: it yields its share of the batches, on its device, and knows the last and short steps."""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from .logging import get_logger
from .operations import send_to_device
from .position import Pass, Position, Progress, Resumes
from .reader import Order, Reader
from .resumption import Generators, Replay, loaded_position
from .sampler import (
    BatchSamplerShard,
    SeedableRandomSampler,
    ShortStep,
    Step,
    epoch_listeners,
    follows_from_epoch,
    generator_of,
    get_sampler,
    index_sampler_of,
    sampler_chain,
)
from .state import GradientState, PartialState
from .streams import StreamShard
from .utils.random import synchronize_rng_states

logger = get_logger(__name__)


class DataLoaderShard(DataLoader):
    """A DataLoader for one process of several. It puts batches on the device, and knows which one is the last.

    When a pass comes to its end, the next one visits the next epoch. After a `break` the next one visits the same epoch
    again. Samplers and data sets that have `set_epoch` are told the epoch when a pass begins.

    One batch is read ahead, as in the original: so the last one is known, and random numbers are drawn for it too.

    The methods of a pass stand below in the order of their calls, and the Reader has a table of what is drawn when. A
    Replay is an Order that `use_stateful_dataloader` alone needs, see `resumption.py`.

    Sizes, for batches of four in the script's loader, and two processes:

                                every process reads       a DataLoaderDispatcher
                                default   split_batches   default   split_batches
        total_batch_size        8         4               8         4               samples of a full step
        batch of a process      4         2               4         2
        _batches_per_step       2         1               2         1               of the script's loader
        batches_read_per_step   1         1               2         1

    Args:
        dataset, kwargs: of DataLoader.
        device: where the batches go; None leaves them.
        rng_types, use_stateful_dataloader: see `prepare_data_loader`.
        synchronized_generator: the "generator" of `rng_types`: the sampler's or the data set's.
        skip_batches: batches of each process, that is steps, to leave out at the beginning of every epoch.
    """

    # Batches that a process reads for one step: the main process of a DataLoaderDispatcher reads those of all ranks.
    batches_read_per_step = 1
    # The original has so many SkipBatchSamplers around the batch sampler: each call of `skip_first_batches` adds one.
    num_skip_samplers = 0

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
        super().__init__(dataset, **kwargs | {"in_order": True})  # Batches and Steps are matched by their places.
        self.device = device
        if rng_types is not None and synchronized_generator is None:
            rng_types = [kind for kind in rng_types if kind != "generator"]
        self.rng_types = rng_types
        self.synchronized_generator = synchronized_generator
        self.skip_batches = skip_batches
        self.use_stateful_dataloader = use_stateful_dataloader
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking
        self.progress = Progress(prepared_skip=skip_batches)
        self._reader: Reader | None = None  # kept only if its workers stay alive from pass to pass

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # DataLoader names a class of its own
        progress = self.progress
        this_pass = progress.begin_pass(self.skip_batches)
        self.gradient_state._add_dataloader(self)
        try:
            steps = self._begin(this_pass)
            following = next(steps, None)
            while following is not None:
                batch, short_step = following
                if self.device is not None:
                    batch = send_to_device(batch, self.device, self._non_blocking)
                following = next(steps, None)
                progress.advance(this_pass, short_step, is_last=following is None)
                yield batch
        finally:
            progress.passes.remove(this_pass)
            self.gradient_state._remove_dataloader(self)
        progress.end_epoch(this_pass)

    def _begin(self, this_pass: Pass) -> Iterator[Step]:
        """Begin to read the steps of the pass, each with the batch of this process."""
        position = this_pass.position
        index_sampler = index_sampler_of(self)
        skipped = position.steps_done * self.batches_read_per_step
        order = Order(position, index_sampler, skipped)
        if self.use_stateful_dataloader:
            order = Replay(position, index_sampler, skipped, self._generators, has_workers=self.num_workers > 0)
        with self._restore_after_beginning(this_pass.resumes):
            if self.rng_types:
                synchronize_rng_states(self.rng_types, self.synchronized_generator)
            self._tell_epoch(position.epoch)
            steps = self._read(order)
            if this_pass.resumes == Resumes.AT_POSITION:
                steps = chain(list(islice(steps, 1)), steps)
        return order.note_read_ahead(steps) if isinstance(order, Replay) else steps

    def _restore_after_beginning(self, resumes: Resumes) -> AbstractContextManager:
        """The context in which a pass begins. Then generators go back to where they were, if the interrupted run drew.

        resumes        what that run had drawn for this pass      go back
        NOT            nothing                                    none
        AT_POSITION    the seed, the order and the first step     all
        BY_HAND        the seed; the order follows from epochs    all but the sampler's
        BY_HAND        the seed and another order                 none, as in the original
        """
        if resumes == Resumes.AT_POSITION:
            return self._generators.restored()
        if resumes == Resumes.NOT:
            return nullcontext()
        if isinstance(self.dataset, IterableDataset) or follows_from_epoch(self.samplers):
            # Loader workers get their first batches here. So a seedable sampler may have drawn, and goes on from there.
            is_shared = self.generator is generator_of(self.samplers[-1])
            loader_generator = None if is_shared else self.generator
            return Generators(self.device, sampler=None, loader_generator=loader_generator).restored()
        logger.warning(
            "the order of the interrupted epoch is lost unless the script has seeded its sampler: in "
            "DataLoaderConfiguration, use_seedable_sampler=True makes it a function of the epoch; "
            "use_stateful_dataloader=True keeps it in checkpoints made in a loop"
        )
        return nullcontext()

    def _read(self, order: Order) -> Iterator[Step]:
        """The steps of this process, each with its batch. A dispatching loader has another way."""
        return self._reader_of(order).read()

    def _reader_of(self, order: Order) -> Reader:
        """A new one for each pass, unless its workers stay alive."""
        if self._reader is not None:
            self._reader.replace_order(order)
            return self._reader
        reader = Reader(self, order)
        if self.persistent_workers:
            self._reader = reader
        return reader

    @property
    def _generators(self) -> Generators:
        return Generators(self.device, self.samplers[-1], self.generator)

    @property
    def gradient_state(self) -> GradientState:
        return GradientState()

    @property
    def end_of_dataloader(self) -> bool:
        """True at the last batch. A script that accumulates within a batch may set it to False, within a loop alone."""
        this_pass = self.progress.current
        return this_pass is not None and this_pass.end_of_dataloader

    @end_of_dataloader.setter
    def end_of_dataloader(self, is_last: bool) -> None:
        this_pass = self.progress.current
        if this_pass is not None:
            this_pass.end_of_dataloader = is_last

    @property
    def short_step(self) -> ShortStep | None:
        """The ShortStep of the batch just yielded; None in a full step, and where nothing is known of the step."""
        this_pass = self.progress.current
        short_step = None if this_pass is None else this_pass.short_step
        # A script may make a loader by itself, or prepare it for one process: then nothing is known of other ranks.
        if short_step is not None and self.shard is None and len(short_step.rows) < PartialState().num_processes:
            return None
        return short_step

    @property
    def remainder(self) -> int:
        """Samples of all processes in the last step; 0 for a full one, as in the original.

        It is -1 outside of a loop, with `drop_last`, and where the size of a batch or of the data set is not known.
        """
        step_size = self.total_batch_size
        if self._drop_last or not self.progress.passes or step_size is None:
            return -1
        try:
            dataset = self._script_dataset
            return getattr(dataset, "total_dataset_length", len(dataset)) % step_size
        except Exception:  # As in the original: the data set has no length, or does not know it.
            return -1

    @property
    def iteration(self) -> int:
        """The epoch that the next pass visits."""
        return self.progress.epoch

    @iteration.setter
    def iteration(self, epoch: int) -> None:
        self.progress.epoch = epoch

    def set_epoch(self, epoch: int) -> None:
        """Outside of a loop: make the next pass visit `epoch`, from where a loaded checkpoint stopped in it, if any."""
        self.iteration = epoch
        self.progress.epoch_is_set = True
        self._tell_epoch(epoch)

    def _tell_epoch(self, epoch: int) -> None:
        listeners = [self.dataset, *self.samplers]
        if not self.progress.epoch_is_set:
            listeners = epoch_listeners(self, self.num_skip_samplers)
        for listener in listeners:
            if hasattr(listener, "set_epoch"):
                listener.set_epoch(epoch)

    def __getstate__(self) -> dict[str, Any]:
        # A copy is outside of the loops over this loader, and its workers are its own.
        progress = replace(self.progress, passes=[])
        return vars(self) | {"_reader": None, "progress": progress}

    def without_first(self, num_batches: int) -> "DataLoaderShard":
        """This loader without the first `num_batches` steps of every epoch. Both have the same epoch."""
        rest = copy.copy(self)
        rest.skip_batches += num_batches
        rest.num_skip_samplers += 1
        rest.progress = self.progress
        return rest

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint: seed and epoch of a SeedableRandomSampler, and what has begun.

        With `use_stateful_dataloader` it holds the position, and the states of the generators that are not global.
        Outside of a loop, also after a `break`, the position is the beginning of the epoch.
        """
        position = self.progress.position
        sampler = self.samplers[-1]
        seed = sampler.initial_seed if isinstance(sampler, SeedableRandomSampler) else None
        state: dict[str, Any] = {}
        if self.progress.epoch_is_open:
            state["epoch_is_open"] = True
        if self.progress.epoch_is_set:
            state["epoch_is_set"] = True
        if self.use_stateful_dataloader:
            state |= vars(position) | self._generators.own_states()
            state |= {"step_size": self._step_size, "sampler_class": type(sampler).__name__, "sampler_seed": seed}
        elif seed is not None:
            state |= {"epoch": position.epoch, "is_over": position.is_over, "sampler_seed": seed}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next pass follow a checkpoint. A loader of which the checkpoint holds nothing gets `{}`.

        By default the next pass visits the whole epoch, or what the loader does not skip. `use_stateful_dataloader`
        makes it continue in the middle, on any number of processes with the same samples per step. A checkpoint at the
        last step of an epoch is followed by the next epoch, as in the original; after `set_epoch` with the number of
        the finished one no batch is left.

        Raises:
            ValueError: if a stateful loader has stopped within an epoch, and its steps had another size or its sampler
                another class.
        """
        sampler = self.samplers[-1]
        position = Position(state_dict.get("epoch", self.iteration), is_over=state_dict.get("is_over", False))
        if self.use_stateful_dataloader and "steps_done" in state_dict:
            position = loaded_position(state_dict, self._step_size, type(sampler).__name__)
            self._generators.load_own_states(state_dict)
            self._reader = None  # Workers that are there belong to another place.
        self.progress.load(
            position, epoch_is_open="epoch_is_open" in state_dict, epoch_is_set="epoch_is_set" in state_dict
        )
        seed = state_dict.get("sampler_seed")
        if isinstance(sampler, SeedableRandomSampler) and seed is not None:  # the saved sampler may have had none
            sampler.initial_seed = seed

    def get_sampler(self) -> Any:
        return get_sampler(self)

    @property
    def samplers(self) -> list:
        """The `sampler_chain` of this loader; for a stream they are torch's, and draw nothing."""
        return sampler_chain(index_sampler_of(self))

    @property
    def shard(self) -> BatchSamplerShard | None:
        """The sampler that deals out the data among processes; None where a loader reads all of them."""
        source = self._batch_source
        return source if isinstance(source, BatchSamplerShard) else None

    @property
    def _batch_source(self) -> Any:
        """The sampler that makes the batches: of sample numbers, or of a stream's samples."""
        return self.dataset.shard if isinstance(self.dataset, StreamShard) else index_sampler_of(self)

    @property
    def _batches_per_step(self) -> int:
        """Batches of the script's loader in a step of all processes."""
        if self.shard is None or self.shard.split_batches:
            return self.batches_read_per_step
        return self.batches_read_per_step * self.shard.num_processes

    @property
    def total_batch_size(self) -> int | None:
        """Samples of a full step over all processes; None if the batch sampler has no batch size."""
        batch_size = getattr(self._batch_source, "batch_size", None)
        return None if batch_size is None else batch_size * self._batches_per_step

    @property
    def _step_size(self) -> int:
        """The `total_batch_size`, for checkpoints also behind a SkipBatchSampler, which has no batch size."""
        sizes = [getattr(sampler, "batch_size", None) for sampler in sampler_chain(self._batch_source)]
        return next(filter(None, sizes), 1) * self._batches_per_step

    def __len__(self) -> int:
        """Batches in an epoch on this process, without those that are skipped."""
        return max(0, super().__len__() - self.skip_batches)

    @property
    def total_dataset_length(self) -> int:
        dataset = self._script_dataset
        return dataset.total_length if hasattr(dataset, "total_length") else len(dataset)

    @property
    def _script_dataset(self) -> Any:
        return self.dataset.dataset if isinstance(self.dataset, StreamShard) else self.dataset
