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
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset

from .dispatcher import DataLoaderDispatcher
from .sampler import SeedableRandomSampler, generator_of, innermost_sampler
from .shard import DataLoaderShard, StepState, index_sampler_of


class GeneratorStates(NamedTuple):
    """The states of the generators from which an epoch's order is drawn."""

    torch: torch.Tensor  # of torch's generator on the CPU
    sampler: torch.Tensor | None  # of the sampler's own; None where it has none and draws from torch's


@dataclass(eq=False)
class Position:
    """A place in an epoch."""

    epoch: int
    step: int  # how many were yielded, including those skipped at the start
    is_over: bool = False  # no step follows
    drawn_from: GeneratorStates | None = None  # right before the order was drawn; None for streams
    resumed: "Position | None" = None  # where a checkpoint was made, if this pass continues from there
    remaining: Iterator[Any] | None = None  # of a resumed epoch, the batches that are read instead of all


@dataclass
class Bookmark:
    """The positions of a loader. A loader and those that `skip_first_batches` makes of it share one object."""

    under_way: list[Position] = field(default_factory=list)  # of each pass that has begun and not ended
    saved: Position | None = None  # where a checkpoint was made; the next pass over the same epoch continues there


@dataclass
class NotedBatches:
    """`batches`, whose order `sampler` draws; the states that it is drawn from are noted in the innermost position.

    It does not know the loader. A loader whose workers stay alive keeps torch's iterator, which keeps this object. In a
    circle only the garbage collector would end the workers, and then torch waits five seconds for each of them.
    """

    batches: Any
    sampler: Any
    bookmark: Bookmark

    def __iter__(self) -> Iterator[Any]:
        position = self.bookmark.under_way[-1]
        if position.remaining is None:
            own = generator_of(self.sampler)
            position.drawn_from = GeneratorStates(torch.get_rng_state(), _state_of(own))
            yield from self.batches
        else:
            yield from position.remaining

    def __len__(self) -> int:
        return len(self.batches)


class StatefulDataLoaderShard(DataLoaderShard):
    """A DataLoaderShard with `state_dict` and `load_state_dict`.

    A checkpoint at the last step of an epoch is followed by the next epoch, as in the original; after `set_epoch` with
    the number of the finished one, by what is left of that: no batch.

    Args:
        args, kwargs: of DataLoaderShard.
        bookmark: of the loader that this one is made from.
        first_step: how many steps this loader leaves out, as `skip_first_batches` was told.
    """

    def __init__(self, *args: Any, bookmark: Bookmark | None = None, first_step: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.use_stateful_dataloader = True
        self._bookmark = Bookmark() if bookmark is None else bookmark
        self._first_step = first_step

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        bookmark = self._bookmark
        position = Position(self.iteration, self._first_step)
        saved = bookmark.saved
        if saved is not None and saved.epoch == self.iteration:
            position.resumed = saved
            position.step = self._first_step or saved.step
            position.drawn_from = saved.drawn_from
        bookmark.saved = None
        bookmark.under_way.append(position)
        first_step = position.step
        try:
            for batch in super().__iter__():
                position.step += 1
                position.is_over = self.end_of_dataloader
                yield batch
        finally:
            bookmark.under_way.remove(position)
        if position.resumed is not None and position.step == first_step:
            self.iteration += 1  # nothing was left of the epoch

    @contextmanager
    def _generators_kept_at_checkpoint(self) -> Iterator[None]:
        if self._bookmark.under_way[-1].resumed is None:
            with super()._generators_kept_at_checkpoint():
                yield
            return
        sampler = self._order_sampler
        own = generator_of(sampler)
        generators = [each for each in (own, self.generator) if each is not None]
        states = [each.get_state() for each in generators]
        with torch.random.fork_rng(self._cuda_devices):
            yield
        if own is not None:
            sampler.generator = own
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)

    def _start_reading(self) -> Any:
        position = self._bookmark.under_way[-1]
        if position.resumed is not None and position.resumed.drawn_from is not None:
            position.remaining = self._draw_again(position.resumed, position.resumed.drawn_from)
            self._iterator = None  # Workers that stayed alive would read a whole epoch.
        return super()._start_reading()

    def _draw_again(self, resumed: Position, drawn_from: GeneratorStates) -> Iterator[Any]:
        """The batches of sample numbers from `resumed` on: those drawn before the checkpoint now, the others later."""
        torch.set_rng_state(drawn_from.torch)
        sampler = self._order_sampler
        own = generator_of(sampler)
        if own is not None and drawn_from.sampler is not None:
            own.set_state(drawn_from.sampler)
        elif own is not None:
            sampler.generator = None  # as it was in the checkpoint's run, on one process
        # A loader that `skip_first_batches` made leaves its first batches out by itself.
        to_skip = 0 if self._first_step else resumed.step * self.batches_per_step
        # For 3 processes of which one reads for all: when step 0 is yielded, the batches 3, 4 and 5 of step 1 have been
        # drawn. The resumed pass begins with batch 3.
        drawn_ahead = self.batches_per_step + self.num_workers * (self.prefetch_factor or 0)
        batches = islice(super()._undrawn_batches, to_skip, None)
        drawn = list(islice(batches, drawn_ahead))
        return chain(drawn, batches)

    @property
    def _undrawn_batches(self) -> Any:
        return NotedBatches(super()._undrawn_batches, self._order_sampler, self._bookmark)

    def _steps(self, reading: Any) -> Iterator[tuple[Any, StepState]]:
        steps = super()._steps(reading)
        resumed = self._bookmark.under_way[-1].resumed
        is_stream = isinstance(self.dataset, IterableDataset)
        if resumed is None or not is_stream or self._first_step:
            return steps
        return islice(steps, resumed.step, None)  # a stream is always read from its first batch on

    @property
    def _order_sampler(self) -> Any:
        """The sampler that draws the order; None for streams."""
        if isinstance(self.dataset, IterableDataset):
            return None
        return innermost_sampler(index_sampler_of(self))

    def _arguments_of_copy(self, num_batches: int) -> dict[str, Any]:
        return super()._arguments_of_copy(num_batches) | {
            "bookmark": self._bookmark,
            "first_step": self._first_step + num_batches,
        }

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass visit `epoch`; where a checkpoint stopped in that very epoch, it continues there."""
        super().set_epoch(epoch)
        saved = self._bookmark.saved
        if saved is not None and saved.epoch != epoch:
            self._bookmark.saved = None

    def state_dict(self) -> dict[str, Any]:
        """The epoch, the steps of it that were yielded, and the states of the generators; for all processes.

        A loader that is not being iterated over is at the beginning of its epoch, also after a `break`.
        """
        if self._bookmark.under_way:
            position = self._bookmark.under_way[-1]
        else:
            position = self._bookmark.saved or Position(self.iteration, 0)
        sampler = self._order_sampler
        return {
            "epoch": position.epoch,
            "step": position.step,
            "is_over": position.is_over,
            "step_size": self.total_batch_size,
            "sampler_seed": sampler.initial_seed if isinstance(sampler, SeedableRandomSampler) else None,
            "sampler_generator": _state_of(generator_of(sampler)),
            "loader_generator": _state_of(self.generator),
            "drawn_from": None if position.drawn_from is None else tuple(position.drawn_from),
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
        self._bookmark.saved = None
        if step:
            drawn_from = state_dict["drawn_from"]
            if drawn_from is not None:
                drawn_from = GeneratorStates(*drawn_from)
            self._bookmark.saved = Position(epoch, step, state_dict["is_over"], drawn_from)

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

    def __getstate__(self) -> dict[str, Any]:
        kept = super().__getstate__()
        kept["_bookmark"] = Bookmark(saved=self._bookmark.saved)  # no pass over the copy has begun
        return kept


class StatefulDataLoaderDispatcher(StatefulDataLoaderShard, DataLoaderDispatcher):
    """A DataLoaderDispatcher with `state_dict` and `load_state_dict`."""


class SeedableOrder:
    """Seed and epoch of a prepared loader with a SeedableRandomSampler: what is saved of a loader by default."""

    def __init__(self, loader: DataLoaderShard) -> None:
        self.loader = loader
        self.sampler: SeedableRandomSampler = innermost_sampler(index_sampler_of(loader))

    def state_dict(self) -> dict[str, int]:
        """The seed, and the epoch that the next step belongs to."""
        epoch = self.loader.iteration + self.loader.end_of_dataloader
        return {"initial_seed": self.sampler.initial_seed, "epoch": epoch}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Let the next pass visit that epoch, from its beginning."""
        self.sampler.initial_seed = state_dict["initial_seed"]
        self.loader.set_epoch(state_dict["epoch"])


def _state_of(generator: torch.Generator | None) -> torch.Tensor | None:
    return None if generator is None else generator.get_state()
