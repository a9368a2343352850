"""Loaders whose position is in checkpoints: `DataLoaderConfiguration(use_stateful_dataloader=True)`.

By default a script says where it goes on: `loader.set_epoch(e)` and `skip_first_batches(loader, n)`. A loader of this
file knows it by itself. Its `state_dict` is the position, and after `load_state_dict` the next pass, a `for` over the
loader, continues with the batch after the last one that was yielded: in any order that one of torch's samplers draws,
and on any number of processes with the same samples per step.

The order is not saved, but the states of the generators when it was drawn. In a resumed run they get these states once
more, the sample numbers that had been drawn before the checkpoint are drawn again, and then the generators are put back
to where the checkpoint had them. An epoch of six batches, with a checkpoint after the third:

    the run        S  a b c are drawn and yielded     C  d e f
    the resumed    S  a b c are drawn and left out    C  d e f

At S the generators get the states `drawn_from`, at C those of the checkpoint, whose `step` is 3.

At C batch d has been read already, and its data set or its collator may have drawn random numbers for it. So what is in
it is saved too. A resumed run reads d again, for what cannot be saved, and puts the saved numbers in the place of the
new ones.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset

from common.nested import leaves, map_nested

from .dispatcher import DataLoaderDispatcher
from .operations import is_list_of_entries
from .sampler import DrawnBatches, SeedableRandomSampler, Tagged, generator_of, innermost_sampler
from .shard import DataLoaderShard, Pass, index_sampler_of
from .state import PartialState
from .utils.random import get_random_states, set_random_states

logger = logging.getLogger(__name__)


class Position(NamedTuple):
    """A place in an epoch, at which a checkpoint is made.

    Attributes:
        step: how many steps were yielded, or skipped at the start.
        is_over: no step follows.
        drawn_from: the states of torch's generator and of the sampler's own, which may be None, right before the order
            was drawn; None for streams.
        read_ahead: what was in the batch that had been read and not yielded, as `_content_of` returns it.
        first_rows: the same of the rows that a dispatched last step is filled up with.
    """

    epoch: int
    step: int
    is_over: bool = False
    drawn_from: tuple[torch.Tensor, torch.Tensor | None] | None = None
    read_ahead: list | None = None
    first_rows: list | None = None


@dataclass(eq=False)
class StatefulPass(Pass):
    """A Pass that knows its Position; `resumed` is the one that it began at."""

    resumed: Position | None = None
    drawn_from: tuple[torch.Tensor, torch.Tensor | None] | None = None
    read_ahead: Tagged | None = None
    first_rows: list | None = None

    def position(self) -> Position:
        read_ahead = None if self.read_ahead is None else _content_of(self.read_ahead.content)
        return Position(self.epoch, self.step, self.end_of_dataloader, self.drawn_from, read_ahead, self.first_rows)


@dataclass
class RepeatableBatches(DrawnBatches):
    """DrawnBatches in an order that another run can draw again.

    Neither it nor a pass knows the loader. A loader whose workers stay alive keeps torch's iterator, which keeps this
    object. In a circle only the garbage collector would end the workers, and then torch waits five seconds for each.

    Attributes:
        sampler: what draws the order of `batches`.
        passes: those under way. The last one of them begins when this is iterated over.
        batches_per_step: to leave out of an epoch that is resumed, for each of its steps that had been yielded.
        drawn_ahead: batches that had been drawn and not yielded by then.
    """

    sampler: Any
    passes: list[StatefulPass]
    batches_per_step: int
    drawn_ahead: int

    def _make_iterator(self) -> Iterator[Any]:
        this_pass = self.passes[-1]
        resumed = this_pass.resumed
        if resumed is None or resumed.drawn_from is None:
            return self._draw_anew(this_pass)
        return self._draw_again(resumed.step, *resumed.drawn_from)

    def _draw_anew(self, this_pass: StatefulPass) -> Iterator[Any]:
        own = generator_of(self.sampler)
        this_pass.drawn_from = torch.get_rng_state(), _state_of(own)
        yield from self.batches

    def _draw_again(self, step: int, state: torch.Tensor, state_of_sampler: torch.Tensor | None) -> Iterator[Any]:
        """The batches after `step`: those that had been drawn before the checkpoint now, the others later."""
        torch.set_rng_state(state)
        own = generator_of(self.sampler)
        if own is not None and state_of_sampler is not None:
            own.set_state(state_of_sampler)
        elif own is not None:
            self.sampler.generator = None  # as it was in the checkpoint's run, on one process
        batches = islice(self.batches, step * self.batches_per_step, None)
        drawn = list(islice(batches, self.drawn_ahead))
        return chain(drawn, batches)


class StatefulDataLoaderShard(DataLoaderShard):
    """A DataLoaderShard with `state_dict` and `load_state_dict`.

    A checkpoint at the last step of an epoch is followed by the next epoch, as in the original; after `set_epoch` with
    the number of the finished one, by what is left of that: no batch.

    Args:
        args, kwargs: of DataLoaderShard.
        first_step: how many steps this loader leaves out, as `skip_first_batches` was told.
    """

    def __init__(self, *args: Any, first_step: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._first_step = first_step
        # Where a checkpoint was made: the next pass, also one of the rest of an epoch, continues there.
        self._saved: Position | None = None

    def _new_pass(self) -> StatefulPass:
        is_rest = self._skipped_from is not None
        this_pass = StatefulPass(self.iteration, is_rest, self._first_step)
        saved = self._whole._saved
        self._whole._saved = None
        if saved is not None and saved.epoch == self.iteration:
            this_pass.is_rest = True
            this_pass.resumed = saved
            this_pass.step = self._first_step or saved.step
            this_pass.drawn_from = saved.drawn_from
        return this_pass

    def _begin_reading(self, this_pass: Any) -> Iterator[Tagged]:
        if this_pass.resumed is None:
            return self._note(super()._begin_reading(this_pass), this_pass)
        return self._note(self._go_on_reading(this_pass.resumed), this_pass)

    def _note(self, reading: Iterator[Tagged], this_pass: StatefulPass) -> Iterator[Tagged]:
        for batch in reading:
            this_pass.read_ahead = batch
            yield batch
        this_pass.read_ahead = None

    def _go_on_reading(self, resumed: Position) -> Iterator[Tagged]:
        """What is left of an epoch. Then the generators are in the states that they have now, as the checkpoint had."""
        device = self.device or torch.device("cpu")
        sampler = self._order_sampler
        own = generator_of(sampler)
        states = {each: each.get_state() for each in (own, self.generator) if each is not None}
        random_states = get_random_states(device)
        self._reader = None  # workers that stayed alive would read a whole epoch
        reading = self._open()
        if isinstance(self.dataset, IterableDataset) and not self._first_step:
            for _ in range(resumed.step):  # a stream is always read from its first batch on
                next(reading, None)
        # What `skip_first_batches` made may begin elsewhere.
        if resumed.read_ahead is not None and self._first_step in (0, resumed.step):
            again = next(reading, None)
            if again is not None:
                reading = chain([again._replace(content=_put_back(resumed.read_ahead, again.content))], reading)
        set_random_states(device, random_states)
        if own is not None:
            sampler.generator = own
        for generator, state in states.items():
            generator.set_state(state)
        return reading

    def _drawn_batches(self) -> RepeatableBatches:
        # For 3 processes of which one reads for all: when step 0 is yielded, the batches 3, 4 and 5 of step 1 have been
        # drawn. The resumed pass begins with batch 3.
        drawn_ahead = self.batches_per_step + self.num_workers * (self.prefetch_factor or 0)
        return RepeatableBatches(
            index_sampler_of(self),
            self._has_whole_batches,
            self._order_sampler,
            self._passes,
            # A loader that `skip_first_batches` made leaves its first batches out by itself.
            batches_per_step=0 if self._first_step else self.batches_per_step,
            drawn_ahead=drawn_ahead,
        )

    @property
    def _order_sampler(self) -> Any:
        """The sampler that draws the order; None for streams."""
        if isinstance(self.dataset, IterableDataset):
            return None
        return innermost_sampler(index_sampler_of(self))

    def arguments_to_skip(self, num_batches: int) -> dict[str, Any]:
        return super().arguments_to_skip(num_batches) | {"first_step": self._first_step + num_batches}

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass visit `epoch`; where a checkpoint stopped in that very epoch, it continues there."""
        super().set_epoch(epoch)
        saved = self._whole._saved
        if saved is not None and saved.epoch != epoch:
            self._whole._saved = None

    def state_dict(self) -> dict[str, Any]:
        """The epoch, the steps of it that were yielded, and the states of the generators; for all processes.

        Only the content of the batch that is read ahead is for one of several processes: see `read_ahead`. A loader
        that is not being iterated over is at the beginning of its epoch, also after a `break`.
        """
        sampler = self._order_sampler
        position = self._position
        return position._asdict() | {
            "read_ahead": {"process": self._own_process, "content": position.read_ahead},
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
        step, rest = divmod(samples, self.total_batch_size)
        if rest:
            where = f"{samples} samples of epoch {epoch}"
            raise ValueError(f"it stopped after {where}, no whole number of steps of {self.total_batch_size}")
        self.iteration = epoch + state_dict["is_over"]
        self._load_generators(state_dict)
        self._whole._saved = None
        if step:
            first_rows = state_dict.get("first_rows")
            position = Position(epoch, step, state_dict["is_over"], state_dict["drawn_from"], first_rows=first_rows)
            self._whole._saved = position
            self.load_read_ahead(state_dict.get("read_ahead"))

    @property
    def _position(self) -> Position:
        """Where a checkpoint that is made now stops."""
        if self._passes:
            return self._passes[-1].position()
        return self._whole._saved or Position(self.iteration, 0)

    def read_ahead(self) -> dict[str, Any]:
        """What is in the batch that this process has read and not yielded, if any; it is this process's own."""
        return {"process": self._own_process, "content": self._position.read_ahead}

    def load_read_ahead(self, read_ahead: dict[str, Any] | None) -> None:
        """Let the next pass begin with that batch, if it is of this process of a run with as many."""
        content = None
        if read_ahead is not None and read_ahead["process"] == self._own_process:
            content = read_ahead["content"]
        if self._whole._saved is not None:
            self._whole._saved = self._whole._saved._replace(read_ahead=content)

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

    def _first_rows(self, first_batch: Any) -> Any:
        this_pass = self._passes[-1]
        rows = super()._first_rows(first_batch)
        if this_pass.resumed is not None and this_pass.resumed.first_rows is not None:
            rows = _put_back(this_pass.resumed.first_rows, rows)  # from before the checkpoint
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
        return None if None in entries else entries
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
        return type(leaf)(kept) if isinstance(leaf, (list, tuple)) else kept

    return map_nested(choose, batch, is_leaf=is_list_of_entries)
