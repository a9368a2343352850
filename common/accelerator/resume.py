"""Loaders whose position is in checkpoints: `DataLoaderConfiguration(use_stateful_dataloader=True)`.

By default a script says where it goes on: `loader.set_epoch(e)` and `skip_first_batches(loader, n)`. A loader of this
file knows it by itself. Its `state_dict` is the position, and after `load_state_dict` the next `for` continues with the
batch after the last one that was yielded: in any order that one of torch's samplers draws, and on any number of
processes with the same samples per step. For that the order of the interrupted epoch is drawn again, from the states
that the generators had when it was drawn first; then the generators are put back.

A pass that was begun and not finished is where the loader stands, as long as somebody keeps its iterator. Of several
such passes it is the one that has come furthest. Which of several loaders the accumulation of gradients listens to is
not saved: a script that reads two at a time begins their iterators in the same order again.

The original builds on torchdata's StatefulDataLoader, which joins the states of workers but not of ranks: with it a run
cannot go on with another number of processes.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import (
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from .dispatcher import DataLoaderDispatcher
from .sampler import (
    DistributedEvalSampler,
    SeedableRandomSampler,
    generator_of,
    groups_in_order,
    innermost_sampler,
    sampler_chain,
)
from .shard import DataLoaderShard, StepState, index_sampler_of
from .state import PartialState

logger = logging.getLogger(__name__)


class GeneratorStates(NamedTuple):
    """The states of the generators from which an epoch's order is drawn."""

    torch: torch.Tensor  # of torch's generator on the CPU
    sampler: torch.Tensor | None  # of the sampler's own; None where it has none and draws from torch's


def _states_now(sampler: Any) -> GeneratorStates:
    return GeneratorStates(torch.get_rng_state(), _state_of(generator_of(sampler)))


@contextmanager
def generators_as_they_were(sampler: Any, before: GeneratorStates | None) -> Iterator[None]:
    """Within the block `sampler` draws from the states `before`; after it the generators are as they are now.

    If the states are not known (None), it draws from the present ones.
    """
    present = _states_now(sampler)
    own_generator = generator_of(sampler)
    if before is not None:
        torch.set_rng_state(before.torch)
        if own_generator is not None and before.sampler is not None:
            own_generator.set_state(before.sampler)
        elif own_generator is not None:
            # The order was drawn by a sampler without a generator, as in a run of one process.
            sampler.generator = None
    try:
        yield
    finally:
        torch.set_rng_state(present.torch)
        if own_generator is not None and present.sampler is not None:
            sampler.generator = own_generator
            own_generator.set_state(present.sampler)


@dataclass(eq=False)
class Pass:
    """One pass over an epoch."""

    epoch: int
    step: int  # yielded, including those skipped at the start
    is_over: bool = False  # no step follows
    rng_before_order: GeneratorStates | None = None  # right before the order was drawn; None for streams
    resumes: "Pass | None" = None  # the pass of the checkpoint in which this one goes on


@dataclass
class LoaderPosition:
    """The position of a loader. A loader and those that `skip_first_batches` makes of it share one object."""

    under_way: list[Pass] = field(default_factory=list)  # begun, and neither finished nor given up
    saved: Pass | None = None  # where a checkpoint was made; the next `for` over the same epoch continues there

    def now(self) -> Pass | None:
        """The pass that says where the loader stands; None at the beginning of an epoch."""
        return max(self.under_way, key=lambda each: (each.epoch, each.step), default=self.saved)

    def newest(self) -> Pass:
        """The pass that began last. What starts it, such as torch's iterator, asks for it."""
        return self.under_way[-1]


class StatefulDataLoaderShard(DataLoaderShard):
    """A DataLoaderShard with `state_dict` and `load_state_dict`.

    A checkpoint at the last step of an epoch is followed by the next epoch, as in the original; after `set_epoch` with
    the number of the finished one, by what is left of that: no batch.

    Args:
        args, kwargs: of DataLoaderShard.
        position: of the loader that this one is made from.
        first_step: how many steps this loader leaves out, as `skip_first_batches` was told.
    """

    def __init__(self, *args: Any, position: LoaderPosition | None = None, first_step: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.use_stateful_dataloader = True
        self._position = LoaderPosition() if position is None else position
        self._first_step = first_step
        self._has_warned = False

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        position = self._position
        own = Pass(self.iteration, self._first_step)
        if position.saved is not None and position.saved.epoch == self.iteration:
            own.resumes = position.saved
            own.step = self._first_step or position.saved.step
        position.saved = None
        position.under_way.append(own)
        first_step = own.step
        batches: Any = super().__iter__()
        try:
            with closing(batches):
                for batch in batches:
                    own.step += 1
                    own.is_over = self.end_of_dataloader
                    yield batch
        finally:
            position.under_way.remove(own)
        if own.resumes is not None and own.step == first_step:
            self.iteration += 1  # nothing was left of the epoch

    @contextmanager
    def _generators_kept_at_checkpoint(self) -> Iterator[None]:
        if self._position.newest().resumes is None:
            with super()._generators_kept_at_checkpoint():
                yield
            return
        state_before = _state_of(self.generator)
        with torch.random.fork_rng(self._cuda_devices):
            yield
        if state_before is not None:
            self.generator.set_state(state_before)

    @property
    def _undrawn_batches(self) -> Any:
        # A loader that `skip_first_batches` made leaves its first batches out by itself.
        batches_per_saved_step = 0 if self._first_step else self.batches_per_step
        # For 3 processes of which one reads for all: when step 0 is yielded, the batches 3, 4 and 5 of step 1 have been
        # drawn. The resumed pass begins with batch 3, so 3 - 1 = 2 further batches had been drawn.
        drawn_ahead = self.batches_per_step - 1 + self.num_workers * (self.prefetch_factor or 0)
        return _BatchesOfPass(
            self._position, super()._undrawn_batches, self._order_sampler, batches_per_saved_step, drawn_ahead
        )

    def _steps(self, reading: Any) -> Iterator[tuple[Any, StepState]]:
        steps = super()._steps(reading)
        saved = self._position.newest().resumes
        is_stream = isinstance(self.dataset, IterableDataset)
        if saved is None or not is_stream or self._first_step:
            return steps
        return islice(steps, saved.step, None)  # a stream is always read from its first batch on

    @property
    def _order_sampler(self) -> Any:
        """The sampler that draws the order; None for streams."""
        if isinstance(self.dataset, IterableDataset):
            return None
        return innermost_sampler(index_sampler_of(self))

    def _arguments_of_copy(self, num_batches: int) -> dict[str, Any]:
        return super()._arguments_of_copy(num_batches) | {
            "position": self._position,
            "first_step": self._first_step + num_batches,
        }

    def set_epoch(self, epoch: int) -> None:
        """Make the next `for` visit `epoch`; where a checkpoint stopped in that very epoch, it continues there."""
        super().set_epoch(epoch)
        saved = self._position.saved
        if saved is not None and saved.epoch != epoch:
            self._position.saved = None

    def state_dict(self) -> dict[str, Any]:
        """The epoch, the steps of it that were yielded, and the states of the generators; for all processes.

        A loader that is not being iterated over is at the beginning of its epoch, also after a `break`.
        """
        current = self._position.now()
        if current is None:
            current = Pass(self.iteration, 0)
        else:
            self._warn_of_what_cannot_be_exact()
        sampler = self._order_sampler
        before_order = current.rng_before_order
        return {
            "epoch": current.epoch,
            "step": current.step,
            "is_over": current.is_over,
            "step_size": self.total_batch_size,
            "sampler_seed": sampler.initial_seed if isinstance(sampler, SeedableRandomSampler) else None,
            "sampler_generator": _state_of(generator_of(sampler)),
            "loader_generator": _state_of(self.generator),
            "drawn_from_torch": None if before_order is None else before_order.torch,
            "drawn_from_sampler": None if before_order is None else before_order.sampler,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next `for` continue there, on any number of processes with the same samples per step.

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
        self._position.saved = None
        if step:
            rng_before_order = None
            if state_dict["drawn_from_torch"] is not None:
                rng_before_order = GeneratorStates(state_dict["drawn_from_torch"], state_dict["drawn_from_sampler"])
            self._position.saved = Pass(epoch, step, state_dict["is_over"], rng_before_order)

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

    def _warn_of_what_cannot_be_exact(self) -> None:
        """Say once what a resumed epoch may not repeat bit for bit."""
        if self._has_warned or PartialState().process_index != 0:
            return
        self._has_warned = True
        if isinstance(self.dataset, IterableDataset):
            logger.warning("a stream is read again up to the checkpoint: what it draws at random may come differently")
        elif not can_be_redrawn(index_sampler_of(self)):
            name = type(self._order_sampler).__name__
            logger.warning("%s may not draw the same order again: it is exact for the samplers of torch alone", name)
        if self.num_workers > 0:
            logger.warning("what a data set draws at random in loader workers starts anew after a checkpoint")


class StatefulDataLoaderDispatcher(StatefulDataLoaderShard, DataLoaderDispatcher):
    """A DataLoaderDispatcher with `state_dict` and `load_state_dict`."""


@dataclass(frozen=True)
class _BatchesOfPass:
    """Batches of sample numbers for the pass that begins when their iterator is made.

    Those of an interrupted epoch are drawn again. The generators are put back when all is drawn that had been drawn
    before the checkpoint: what follows it, and as many batches more as were read ahead.

    It does not know the loader. A loader whose workers stay alive keeps torch's iterator, which keeps this object. In a
    circle only the garbage collector would end the workers, and then torch waits five seconds for each of them.
    """

    position: LoaderPosition  # of the loader
    batches: Any  # of the whole epoch
    sampler: Any  # draws the order
    batches_per_saved_step: int  # left out for each step before the checkpoint
    drawn_ahead: int  # after the checkpoint, when it was made

    def __iter__(self) -> Iterator[Any]:
        return self._draw(self.position.newest(), iter(self.batches))

    def __len__(self) -> int:
        return len(self.batches)

    def _draw(self, own: Pass, batches: Iterator[Any]) -> Iterator[Any]:
        saved = own.resumes
        if saved is None:
            own.rng_before_order = _states_now(self.sampler)
            yield from batches
            return
        first_batch = saved.step * self.batches_per_saved_step
        with ExitStack() as drawing_again:
            drawing_again.enter_context(generators_as_they_were(self.sampler, saved.rng_before_order))
            own.rng_before_order = _states_now(self.sampler)
            for number, batch in enumerate(islice(batches, first_batch, None)):
                if number == self.drawn_ahead:
                    drawing_again.close()
                yield batch


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
        """Let the next `for` visit that epoch, from its beginning."""
        self.sampler.initial_seed = state_dict["initial_seed"]
        self.loader.set_epoch(state_dict["epoch"])


# Samplers that draw the whole order of an epoch when it begins, from their own generator, torch's or a seed.
_DRAWN_AT_ONCE = (
    SequentialSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
    DistributedEvalSampler,
    Sequence,
)


def can_be_redrawn(batch_sampler: Any) -> bool:
    """True where the order of `batch_sampler` is known to be drawn from torch's generators when an epoch begins.

    A sampler of the script's own may draw from elsewhere, or while the epoch goes on.
    """
    *wrappers, sampler = sampler_chain(batch_sampler)
    if isinstance(sampler, RandomSampler) and sampler.replacement:
        return False
    return isinstance(sampler, _DRAWN_AT_ONCE) and all(map(groups_in_order, wrappers))


def _state_of(generator: torch.Generator | None) -> torch.Tensor | None:
    return None if generator is None else generator.get_state()
