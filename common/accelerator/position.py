"""Where a loader stands in an epoch, and how the next pass, a `for` over the loader, goes on from there.

By default a script says where it goes on: `loader.set_epoch(e)` and `skip_first_batches(loader, n)`. With
`DataLoaderConfiguration(use_stateful_dataloader=True)` checkpoints hold the Position, and the next pass continues with
the batch after the last one that was yielded: in any order that one of torch's samplers draws, and on any number of
processes with the same samples per step.

The order is not saved, but the states of the generators when it was drawn: `drawn_from`, here S. An epoch of six
batches, with a checkpoint after the third, when the generators are in the states C:

    the run        S  a b c are drawn and yielded     C  d e f
    the resumed    S  a b c are drawn and left out    C  d e f

The resumed pass remembers C, to which `load_state` has put the generators (`restored_generators`). It puts them to S,
draws the order again, leaves out a, b and c (`DrawnBatches`), and goes back to C.

At C batch d has been read already, and its data set or its collator may have drawn random numbers for it. So what is in
it is saved too. The resumed pass reads d again, for what cannot be saved, and puts the saved numbers in the place of
the new ones (`put_back`).
"""

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any

import torch

from common.nested import honor_type, leaves, map_nested

from .operations import is_list_of_entries
from .sampler import BatchSamplerShard, ShortStep, Step, generator_of, innermost_sampler
from .utils.random import get_random_states, set_random_states

logger = logging.getLogger(__name__)


@dataclass
class Position:
    """Where a pass stands, and what a checkpoint holds of it.

    Attributes:
        epoch, step: so many steps of the epoch were yielded, or left out at its beginning.
        is_over: the last of them was the last of the epoch.
        drawn_from: the states of torch's generator and of the sampler's own, which may be None, right before the order
            was drawn; None for streams, and before that.
        first_rows, content_ahead: what is in `first_rows` and `ahead` of the Pass, see `content_of`; for checkpoints.
    """

    epoch: int
    step: int = 0
    is_over: bool = False
    drawn_from: tuple[torch.Tensor, torch.Tensor | None] | None = None
    first_rows: list | None = None
    content_ahead: list | None = None


@dataclass(eq=False)
class Pass:
    """One `for` over a loader, from its beginning to its end.

    Attributes:
        position: where it stands.
        is_resumed: it began at a Position from a checkpoint.
        short_steps: the ShortSteps of the batches whose numbers torch's loader has drawn, and which are not read yet.
        ahead: the step that was read and not yielded.
        first_rows: what a dispatched last step is filled up with.
        remainder, short_step: of the batch that was yielded last, see these properties of the loader.
    """

    position: Position
    is_resumed: bool = False
    short_steps: deque[ShortStep | None] = field(default_factory=deque)
    ahead: Step | None = None
    first_rows: Any = None
    remainder: int = -1
    short_step: ShortStep | None = None


@dataclass(eq=False)
class Progress:
    """Where the loops over a loader stand. It and what `skip_first_batches` makes of it share one Progress.

    Attributes:
        epoch: the one that the next pass visits.
        passes: those that have begun and not ended. A script may begin one within another; the one that yielded a batch
            last stands last.
        is_loaded: `load_state` was called, and no pass has begun since.
        loaded: the Position from that checkpoint, if it holds one; the next pass begins there.
    """

    epoch: int = 0
    passes: list[Pass] = field(default_factory=list)
    is_loaded: bool = False
    loaded: Position | None = None

    @property
    def next_position(self) -> Position:
        """Where the next pass begins if it skips nothing."""
        if self.loaded is not None and self.loaded.epoch == self.epoch:
            return self.loaded
        return Position(self.epoch)

    @property
    def current(self) -> Pass:
        """The pass that yielded a batch last; outside of a loop one that has not begun."""
        return self.passes[-1] if self.passes else Pass(self.next_position)

    def begin_pass(self, num_to_skip: int) -> Pass:
        """A pass over the epoch without the steps to skip or, after loading, from the loaded Position on."""
        position = self.next_position
        this_pass = Pass(position, is_resumed=position is self.loaded)
        if num_to_skip not in (0, position.step):  # a script that skips after loading knows better where to go on
            position.step = num_to_skip
            position.content_ahead = None
        self.loaded = None
        self.passes.append(this_pass)
        return this_pass

    def make_current(self, yielding: Pass) -> None:
        """Put the pass that is about to yield a batch in the last place."""
        if self.passes[-1] is not yielding:
            self.passes.remove(yielding)
            self.passes.append(yielding)

    def position(self) -> Position:
        """Where the current pass stands, with what a checkpoint holds of it."""
        current = self.current
        position = replace(current.position)
        if current.ahead is not None:
            position.content_ahead = content_of(current.ahead.content)
        if current.first_rows is not None:
            position.first_rows = content_of(current.first_rows)
        return position


@dataclass
class DrawnBatches:
    """The batch sampler of torch's loader: the batches of the pass that begins, in an order that can be drawn again.

    torch returns batches in the order in which it has drawn their numbers, so the first of the pass's `short_steps`
    belongs to the next batch.

    It does not know the loader. A loader whose workers stay alive keeps torch's iterator, which keeps this object. In a
    circle only the garbage collector would end the workers, and then torch waits five seconds for each.

    Attributes:
        batches: a BatchSamplerShard, or what the script reads by: batches of sample numbers, or single numbers.
        are_batches: they are no single numbers.
        batches_per_step: how many of them make a step.
        is_stateful: checkpoints hold the position, so nothing may be drawn before `drawn_from` is noted.
    """

    batches: Any
    progress: Progress
    are_batches: bool
    batches_per_step: int
    is_stateful: bool

    def __iter__(self) -> Iterator[Any]:
        this_pass = self.progress.current
        batches = self.batches
        if this_pass.position.step == 0 and not self.is_stateful:
            # Some batch samplers draw when their iterator is made. In the original that is before torch draws a seed.
            batches = iter(batches)
        return self._draw(batches, this_pass)

    def _draw(self, batches: Iterable[Any], this_pass: Pass) -> Iterator[Any]:
        position = this_pass.position
        sampler = innermost_sampler(self.batches)
        if position.drawn_from is None:
            position.drawn_from = torch.get_rng_state(), state_of(generator_of(sampler))
        else:
            _set_states(sampler, *position.drawn_from)
        if isinstance(self.batches, BatchSamplerShard):
            steps = self.batches.steps()
        else:
            steps = self._steps_of_one_process(batches)
        for batch, short_step in islice(steps, position.step * self.batches_per_step, None):
            this_pass.short_steps.append(short_step)
            yield batch

    def _steps_of_one_process(self, batches: Iterable[Any]) -> Iterator[Step]:
        """Each batch as a step; a short one if it has another size than the batch sampler says."""
        full_size = getattr(self.batches, "batch_size", None)
        for batch in batches:
            short_step = None
            if self.are_batches and len(batch) != full_size:
                rows = (len(batch),)
                short_step = ShortStep(rank=0, rows=rows, real=rows)
            yield Step(batch, short_step)


@contextmanager
def restored_generators(
    device: torch.device | None, sampler: Any, loader_generator: torch.Generator | None, enabled: bool
) -> Iterator[None]:
    """If `enabled`, restore all generators to where they are now, whatever is drawn within."""
    if not enabled:
        yield
        return
    device = device or torch.device("cpu")
    own = generator_of(sampler)
    states = {each: each.get_state() for each in (own, loader_generator) if each is not None}
    random_states = get_random_states(device)
    yield
    set_random_states(device, random_states)
    if own is not None:
        sampler.generator = own
    for generator, state in states.items():
        generator.set_state(state)


def read_again(reading: Iterator[Step], position: Position) -> Iterator[Step]:
    """`reading`, of which the first step was read before the checkpoint too: it is read now, with the saved content."""
    content = position.content_ahead
    position.content_ahead = None
    first = next(reading, None)
    if first is None:
        return reading
    return chain([Step(put_back(content, first.content), first.short_step)], reading)


def state_of(generator: torch.Generator | None) -> torch.Tensor | None:
    """The state of the generator, if there is one."""
    return None if generator is None else generator.get_state()


def _set_states(sampler: Any, state: torch.Tensor, state_of_sampler: torch.Tensor | None) -> None:
    torch.set_rng_state(state)
    own = generator_of(sampler)
    if own is not None and state_of_sampler is not None:
        own.set_state(state_of_sampler)
    elif own is not None:
        sampler.generator = None  # as it was in the checkpoint's run, on one process


def content_of(batch: Any) -> list:
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


def put_back(content: list | None, batch: Any) -> Any:
    """`batch`, which has been read again, with the saved content, if there is any, in the place of the new one."""
    if content is None:
        return batch
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
