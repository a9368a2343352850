"""Loaders whose position is in checkpoints: `DataLoaderConfiguration(use_stateful_dataloader=True)`.

By default a script says where it goes on: `loader.set_epoch(e)` and `skip_first_batches(loader, n)`. A loader of this
file knows it by itself. Its `state_dict` is the position, and after `load_state_dict` the next pass, a `for` over the
loader, continues with the batch after the last one that was yielded: in any order that one of torch's samplers draws,
and on any number of processes with the same samples per step.

The order is not saved, but the states of the generators when it was drawn: `drawn_from`, here S. An epoch of six
batches, with a checkpoint after the third, when the generators are in the states C:

    the run        S  a b c are drawn and yielded     C  d e f
    the resumed    S  a b c are drawn and left out    C  d e f

The resumed pass begins in three steps. It remembers C, to which `load_state` has put the generators. It replays the
beginning of the epoch: puts them to S, draws the order again, and leaves out a, b and c. It restores C.

At C batch d has been read already, and its data set or its collator may have drawn random numbers for it. So what is in
it is saved too. The replay reads d again, for what cannot be saved, and puts the saved numbers in the place of the new
ones.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import IterableDataset

from common.nested import honor_type, leaves, map_nested

from .dispatcher import DataLoaderDispatcher
from .operations import is_list_of_entries
from .sampler import DrawnBatches, SeedableRandomSampler, Tagged, generator_of, innermost_sampler
from .shard import DataLoaderShard, Pass, PassStack, index_sampler_of
from .state import PartialState
from .utils.random import get_random_states, set_random_states

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class StatefulPass(Pass):
    """A Pass that a checkpoint can hold. `load_state_dict` makes it again, and the next `for` over the loader goes on.

    Attributes:
        drawn_from: the states of torch's generator and of the sampler's own, which may be None, right before the order
            was drawn; None for streams.
        batch_ahead: the batch that has been read and not yielded.
        content_ahead: what is in that batch, as `_content_of` returns it, until it is read again after loading.
        first_rows: the same of the rows that a dispatched last step is filled up with.
    """

    drawn_from: tuple[torch.Tensor, torch.Tensor | None] | None = None
    batch_ahead: Tagged | None = None
    content_ahead: list | None = None
    first_rows: list | None = None


@dataclass
class RepeatableBatches(DrawnBatches):
    """DrawnBatches in an order that another run can draw again.

    It does not know the loader. A loader whose workers stay alive keeps torch's iterator, which keeps this object. In a
    circle only the garbage collector would end the workers, and then torch waits five seconds for each.

    Attributes:
        sampler: what draws the order of `batches`.
        passes: those under way. The one on top begins when this is iterated over.
        first_step: how many steps `batches` leaves out by itself, each of `batches_per_step`.
    """

    sampler: Any
    passes: PassStack
    first_step: int
    batches_per_step: int

    def _make_iterator(self) -> Iterator[Any]:
        """The batches of the pass on top. The order is drawn when the first of them is asked for."""
        this_pass: StatefulPass = self.passes.top
        own = generator_of(self.sampler)
        if this_pass.drawn_from is None:
            this_pass.drawn_from = torch.get_rng_state(), _state_of(own)
        else:
            state, state_of_sampler = this_pass.drawn_from
            torch.set_rng_state(state)
            if own is not None and state_of_sampler is not None:
                own.set_state(state_of_sampler)
            elif own is not None:
                self.sampler.generator = None  # as it was in the checkpoint's run, on one process
        steps_to_leave_out = this_pass.step - self.first_step
        yield from islice(self.batches, steps_to_leave_out * self.batches_per_step, None)


class StatefulDataLoaderShard(DataLoaderShard):
    """A DataLoaderShard with `state_dict` and `load_state_dict`.

    A checkpoint at the last step of an epoch is followed by the next epoch, as in the original; after `set_epoch` with
    the number of the finished one, by what is left of that: no batch.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The pass that a checkpoint was made in. The next pass, also one of the rest of an epoch, goes on with it.
        self._interrupted: StatefulPass | None = None

    def _new_pass(self) -> StatefulPass:
        interrupted = self._origin._interrupted
        if interrupted is not None and interrupted.epoch == self.iteration:
            return interrupted
        return StatefulPass(self.iteration, self._first_step)

    def _begin_reading(self, this_pass: Any) -> Iterator[Tagged]:
        interrupted = self._origin._interrupted
        self._origin._interrupted = None
        if this_pass is interrupted:
            if self._first_step > 0:
                self._move_to_first_step(this_pass)
            with self._restored_generators():
                reading = self._replay(this_pass)
        else:
            reading = super()._begin_reading(this_pass)
        return self._note(reading, this_pass)

    def _move_to_first_step(self, interrupted: StatefulPass) -> None:
        """Let the pass begin where `skip_first_batches` says, for a script that skips by itself after loading."""
        reads_that_batch_first = interrupted.step == self._first_step and self.skip_batches == 0
        if not reads_that_batch_first:
            interrupted.content_ahead = None
        interrupted.step = self._first_step

    @contextmanager
    def _restored_generators(self) -> Iterator[None]:
        """Put all generators back to where they are now, whatever is drawn within."""
        device = self.device or torch.device("cpu")
        sampler = self._order_sampler
        own = generator_of(sampler)
        states = {each: each.get_state() for each in (own, self.generator) if each is not None}
        random_states = get_random_states(device)
        yield
        set_random_states(device, random_states)
        if own is not None:
            sampler.generator = own
        for generator, state in states.items():
            generator.set_state(state)

    def _replay(self, interrupted: StatefulPass) -> Iterator[Tagged]:
        """Draw the order again, leave out the steps before the checkpoint, and read the batch behind it again."""
        self._reader = None  # workers that stayed alive would read a whole epoch
        reading = self._begin_epoch()
        if isinstance(self.dataset, IterableDataset):  # is always read from its first batch on
            reading = islice(reading, interrupted.step - self._first_step, None)
        ahead = next(reading, None)
        content = interrupted.content_ahead
        interrupted.content_ahead = None
        if ahead is None:
            return reading
        if content is not None:
            ahead = ahead._replace(content=_put_back(content, ahead.content))
        return chain([ahead], reading)

    def _note(self, reading: Iterator[Tagged], this_pass: StatefulPass) -> Iterator[Tagged]:
        """What is in `reading`, of which `this_pass` keeps the batch that was read last."""
        for batch in reading:
            this_pass.batch_ahead = batch
            yield batch
        this_pass.batch_ahead = None

    def _drawn_batches(self) -> RepeatableBatches:
        return RepeatableBatches(
            index_sampler_of(self),
            self._is_unsharded,
            self._order_sampler,
            self._passes,
            first_step=self._first_step,
            batches_per_step=self.batches_per_step,
        )

    @property
    def _order_sampler(self) -> Any:
        """The sampler that draws the order; for a stream one of torch's, which draws nothing."""
        return innermost_sampler(index_sampler_of(self))

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass visit `epoch`; where a checkpoint stopped in that very epoch, it continues there."""
        super().set_epoch(epoch)
        interrupted = self._origin._interrupted
        if interrupted is not None and interrupted.epoch != epoch:
            self._origin._interrupted = None

    def state_dict(self) -> dict[str, Any]:
        """The epoch, the steps of it that were yielded, and the states of the generators; for all processes.

        Only the content of the batch that is read ahead is for one of several processes: see `read_ahead`. A loader
        that is not being iterated over is at the beginning of its epoch, also after a `break`.
        """
        sampler = self._order_sampler
        saved = self._pass_to_save
        return {
            "epoch": saved.epoch,
            "step": saved.step,
            "is_over": saved.end_of_dataloader,
            "drawn_from": saved.drawn_from,
            "first_rows": saved.first_rows,
            "read_ahead": self.read_ahead(),
            "step_size": self.total_batch_size,
            "sampler_seed": sampler.initial_seed if isinstance(sampler, SeedableRandomSampler) else None,
            "sampler_generator": _state_of(generator_of(sampler)),
            "loader_generator": _state_of(self.generator),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next pass continue there, on any number of processes with the same samples per step.

        Raises:
            ValueError: if the samples yielded before are no whole number of this loader's steps.
        """
        epoch = state_dict["epoch"]
        samples = state_dict["step"] * state_dict["step_size"]
        step_size = self.total_batch_size
        step, rest = divmod(samples, step_size)
        if rest:
            raise ValueError(f"{samples} samples of epoch {epoch} are no whole number of steps of {step_size}")
        self.iteration = epoch + state_dict["is_over"]
        self._load_generators(state_dict)
        self._origin._interrupted = None
        if step:
            self._origin._interrupted = StatefulPass(
                epoch,
                step,
                end_of_dataloader=state_dict["is_over"],
                drawn_from=state_dict["drawn_from"],
                first_rows=state_dict.get("first_rows"),
            )
            self.load_read_ahead(state_dict.get("read_ahead"))

    @property
    def _pass_to_save(self) -> StatefulPass:
        """The pass under way or, outside of a loop, the one that the next loop begins with."""
        return self._passes.top or self._origin._interrupted or StatefulPass(self.iteration)

    def read_ahead(self) -> dict[str, Any]:
        """What is in the batch that this process has read and not yielded, if any; it is this process's own."""
        saved = self._pass_to_save
        content = saved.content_ahead
        if saved.batch_ahead is not None:
            content = _content_of(saved.batch_ahead.content)
        return {"process": self._own_process, "content": content}

    def load_read_ahead(self, read_ahead: dict[str, Any] | None) -> None:
        """Let the next pass begin with that batch, if it is of this process of a run with as many."""
        interrupted = self._origin._interrupted
        if interrupted is not None and read_ahead is not None and read_ahead["process"] == self._own_process:
            interrupted.content_ahead = read_ahead["content"]

    @property
    def _own_process(self) -> tuple[int, int]:
        """The process whose batches these are, and the number of processes that share them."""
        shard: Any = PartialState() if self._shard is None else self._shard
        return shard.process_index, shard.num_processes

    def _load_generators(self, state_dict: dict[str, Any]) -> None:
        sampler = self._order_sampler
        if isinstance(sampler, SeedableRandomSampler):
            sampler.initial_seed = state_dict["sampler_seed"]
        own = state_dict["sampler_generator"]
        if own is not None:
            # A sampler of a single process has no generator where the checkpoint's run, on several processes, gave it
            # one. A SeedableRandomSampler makes its own when its first pass begins.
            if hasattr(sampler, "generator") and sampler.generator is None:
                sampler.generator = torch.Generator()
            generator = generator_of(sampler)
            if generator is not None:
                generator.set_state(own)
        if state_dict["loader_generator"] is not None and self.generator is not None:
            self.generator.set_state(state_dict["loader_generator"])


class StatefulDataLoaderDispatcher(StatefulDataLoaderShard, DataLoaderDispatcher):
    """A DataLoaderDispatcher with `state_dict` and `load_state_dict`."""

    def _first_rows(self, first_batch: Any, this_pass: Any) -> Any:
        rows = super()._first_rows(first_batch, this_pass)
        if this_pass.first_rows is not None:  # from before the checkpoint
            rows = _put_back(this_pass.first_rows, rows)
        this_pass.first_rows = _content_of(rows)
        return rows


class SeedableOrder:
    """Seed and epoch of a prepared loader with a SeedableRandomSampler: what is saved of a loader by default."""

    def __init__(self, loader: DataLoaderShard) -> None:
        self.loader = loader
        self.sampler: SeedableRandomSampler = innermost_sampler(index_sampler_of(loader))

    def state_dict(self) -> dict[str, int]:
        """The seed, and the epoch that the next step belongs to."""
        return {"initial_seed": self.sampler.initial_seed, "epoch": self.loader.epoch_of_next_step}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Let the next pass visit that epoch, from its beginning."""
        self.sampler.initial_seed = state_dict["initial_seed"]
        self.loader.set_epoch(state_dict["epoch"])


def _state_of(generator: torch.Generator | None) -> torch.Tensor | None:
    return None if generator is None else generator.get_state()


def _content_of(batch: Any) -> list:
    """The tensors, numbers and texts in `batch`; None in the place of what a checkpoint cannot hold."""
    return [_copy_if_plain(leaf) for leaf in leaves(batch, is_list_of_entries)]


def _copy_if_plain(leaf: Any) -> Any:
    if type(leaf) is torch.Tensor:  # files with other classes would not be loaded
        return leaf.detach().cpu().clone()  # a part of a larger tensor would be saved with all of it
    if isinstance(leaf, (list, tuple)):
        entries = [_copy_if_plain(entry) for entry in leaf]
        if any(entry is None for entry in entries):
            return None
        return tuple(entries) if isinstance(leaf, tuple) else entries
    return leaf if type(leaf) in (bool, int, float, complex, str, bytes) else None


def _put_back(content: list, batch: Any) -> Any:
    """`batch`, which has been read again, with the saved content in the place of the new one."""
    if len(list(leaves(batch, is_list_of_entries))) != len(content):
        logger.warning("the batch after a checkpoint has another structure now: its random numbers are other ones")
        return batch
    saved = iter(content)

    def choose(leaf: Any) -> Any:
        kept = next(saved)
        if kept is None:
            return leaf
        return honor_type(leaf, kept) if isinstance(leaf, (list, tuple)) else kept

    return map_nested(choose, batch, is_leaf=is_list_of_entries)
