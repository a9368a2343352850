"""The position of a loader in an epoch, and how the next pass, a `for` over the loader, goes on from there.

By default a script says where it goes on: `loader.set_epoch(e)` and `skip_first_batches(loader, n)`. With
`DataLoaderConfiguration(use_stateful_dataloader=True)` checkpoints hold the position, and the next pass continues with
the batch after the last one that was yielded: in any order that one of torch's samplers draws, and on any number of
processes with the same samples per step.

The order is not saved, but the states of the generators when it was drawn: `drawn_from`, here S. An epoch of six
batches, with a checkpoint after the third, when the generators are in the states C:

    the run        S  a b c are drawn and yielded     C  d e f
    the resumed    S  a b c are drawn and left out    C  d e f

The resumed pass remembers C, to which `load_state` has put the generators (`restored_generators`). It puts them to S,
draws the order again, leaves out a, b and c (`PassSampler`), and goes back to C.

At C batch d has been read already, and its data set or its collator may have drawn random numbers for it. So its
tensors, numbers and texts are saved too (`content_of`). The resumed pass reads d again, for its structure and for what
cannot be saved, and puts the saved content in the place of the new one (`put_back`).

Three classes hold what is known of this:

    Progress   of a loader, as long as it lives: the epoch of the next pass, and the passes that have begun
    Pass       of one `for`: what has been read, drawn and yielded until now
    Position   of a moment in a pass: what a checkpoint saves, and where a resumed pass begins
"""

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import torch

from common.nested import leaves, map_nested

from .sampler import ShortStep, Step, generator_of, innermost_sampler, steps_of
from .utils.random import get_random_states, set_random_states

logger = logging.getLogger(__name__)

# The states of torch's generator and of the sampler's own, which may have none. A checkpoint holds them as they are.
GeneratorStates = tuple[torch.Tensor, torch.Tensor | None]


class Position(NamedTuple):
    """A place in an epoch, as checkpoints hold it.

    Attributes:
        epoch: the number of the epoch.
        step: steps of the epoch that were yielded or skipped.
        is_over: True if the last of them was the last step of the epoch.
        drawn_from: the states from which a stateful loader drew the order; None if it has drawn none on this process,
            and for all other loaders.
        read_ahead: `content_of` the batch that was read and not yielded.
        first_rows: `content_of` the rows that fill up a dispatched last step.
    """

    epoch: int
    step: int = 0
    is_over: bool = False
    drawn_from: GeneratorStates | None = None
    read_ahead: list | None = None
    first_rows: list | None = None


@dataclass(eq=False)
class Pass:
    """One `for` over a loader, from its beginning to its end.

    These are known when it begins:
        start: where it begins.
        is_resumed: True if it is the first pass after a checkpoint was loaded, and begins within an epoch.
        has_saved_order: True if this checkpoint was made in a stateful loader's pass over the same epoch.
    The loop notes these:
        step: steps of the epoch that were yielded or skipped.
        end_of_dataloader, short_step: what is known of the batch that was yielded last.
        read_ahead: the batch that was read and not yielded.
    PassSampler notes these:
        drawn_from: see Position.
        drawn_short_steps: those of the batches whose numbers torch's loader has drawn, and which it has not returned.
            The example at the head of `sampler.py` shows their way.
    DataLoaderDispatcher notes this:
        first_rows: the rows that fill up a last step.
    """

    start: Position
    is_resumed: bool
    has_saved_order: bool
    step: int
    end_of_dataloader: bool = False
    short_step: ShortStep | None = None
    read_ahead: Any = None
    drawn_from: GeneratorStates | None = None
    drawn_short_steps: deque[ShortStep | None] = field(default_factory=deque)
    first_rows: Any = None

    def position(self) -> Position:
        """The position after the batch that was yielded last."""
        return Position(
            epoch=self.start.epoch,
            step=self.step,
            is_over=self.end_of_dataloader,
            drawn_from=self.drawn_from,
            read_ahead=content_of(self.read_ahead),
            first_rows=content_of(self.first_rows),
        )


@dataclass(eq=False)
class Progress:
    """The epoch of a loader and the loops over it. What `skip_first_batches` makes of a loader shares its Progress.

    Attributes:
        epoch: the one that the next pass visits.
        passes: those that have begun and not ended. A script may begin one within another. The one that began or
            yielded a batch last stands last.
        follows_checkpoint: True if a checkpoint was loaded and no pass has begun since.
        loaded_position: the position within an epoch that this checkpoint holds. None if there is no such checkpoint,
            or if it holds none, because the loader is not stateful or was not in a pass.
    """

    epoch: int = 0
    passes: list[Pass] = field(default_factory=list)
    follows_checkpoint: bool = False
    loaded_position: Position | None = None

    @property
    def current(self) -> Pass | None:
        """The pass that yielded a batch last; None outside of a loop."""
        return self.passes[-1] if self.passes else None

    def next_position(self, num_to_skip: int = 0) -> Position:
        """The position at which the next pass begins."""
        position = self.loaded_position
        if position is None or position.epoch != self.epoch:
            position = Position(self.epoch)
        if num_to_skip in (0, position.step):
            return position
        # A script that skips after loading knows better where to go on. There the batch that was read ahead is no use.
        return position._replace(step=num_to_skip, read_ahead=None)

    def begin_pass(self, num_to_skip: int) -> Pass:
        """The pass that begins now. It follows the loaded checkpoint, if there is one, and later passes do not."""
        start = self.next_position(num_to_skip)
        is_resumed = self.follows_checkpoint and start.step > 0
        has_saved_order = self.loaded_position is not None and self.loaded_position.epoch == start.epoch
        this_pass = Pass(start, is_resumed, has_saved_order, step=start.step)
        self.passes.append(this_pass)
        self.follows_checkpoint = False
        self.loaded_position = None
        return this_pass

    def make_current(self, yielding: Pass) -> None:
        """Put the pass that is about to yield a batch in the last place."""
        self.passes.remove(yielding)
        self.passes.append(yielding)


class PassSampler:
    """The batch sampler of torch's loader: the batches of the pass that begins, from where it begins.

    Torch calls `iter` when a pass begins; with new workers it calls it twice. Workers that stay alive keep this object
    for all passes, so it finds the pass that begins in the loader's Progress, as the last one. With the loader itself
    it would form a circle: only the garbage collector would end the workers, and torch waits five seconds for each.

    Torch returns batches in the order in which it has drawn their numbers. So the first of the pass's
    `drawn_short_steps` belongs to the next batch.

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
        this_pass = self.progress.passes[-1]
        # Some batch samplers draw random numbers in `iter`. Torch calls `iter` before it draws its own seed, so calling
        # theirs now keeps the original's order of draws. Where batches are skipped, the original calls it after that
        # seed. So does a stateful loader: workers that stay alive draw the seed once, and a resumed run draws it again.
        draws_at_once = not self.is_stateful and this_pass.start.step == 0
        steps = steps_of(self.batches) if draws_at_once else self._draw_later(this_pass)
        return self._remember_short_steps(steps, this_pass)

    def _draw_later(self, this_pass: Pass) -> Iterator[Step]:
        """The steps of an order that is drawn when torch asks for the first batch, and has drawn its seed."""
        if self.is_stateful:
            self._draw_from_known_states(this_pass)
        yield from steps_of(self.batches)

    def _draw_from_known_states(self, this_pass: Pass) -> None:
        """Note the generators' states or, in a pass that goes on in an order drawn before, put them back."""
        sampler = innermost_sampler(self.batches)
        generator = generator_of(sampler)
        if this_pass.start.drawn_from is None:
            this_pass.drawn_from = torch.get_rng_state(), state_of(generator)
            return
        this_pass.drawn_from = this_pass.start.drawn_from
        torch_state, sampler_state = this_pass.drawn_from
        torch.set_rng_state(torch_state)
        set_state(generator, sampler_state)
        if sampler_state is None and generator is not None:
            sampler.generator = None  # as it was on the one process that drew the order first

    def _remember_short_steps(self, steps: Iterator[Step], this_pass: Pass) -> Iterator[Any]:
        """The batches of the steps, without those that the pass skips. Their ShortSteps are remembered in the pass."""
        for batch, short_step in islice(steps, this_pass.start.step * self.batches_per_step, None):
            this_pass.drawn_short_steps.append(short_step)
            yield batch


def state_of(generator: torch.Generator | None) -> torch.Tensor | None:
    """The state of the generator, if there is one."""
    return None if generator is None else generator.get_state()


def set_state(generator: torch.Generator | None, state: torch.Tensor | None) -> None:
    """Put the generator into that state, if there are both."""
    if generator is not None and state is not None:
        generator.set_state(state)


@contextmanager
def restored_generators(
    device: torch.device | None, sampler: Any, loader_generator: torch.Generator | None
) -> Iterator[None]:
    """Restore all generators to where they are now, whatever is drawn within. The sampler gets its own one back."""
    device = device or torch.device("cpu")
    random_states = get_random_states(device)
    own = generator_of(sampler)
    own_state = state_of(own)
    loader_state = state_of(loader_generator)
    try:
        yield
    finally:
        set_random_states(device, random_states)
        if own is not None:
            sampler.generator = own
        set_state(own, own_state)
        set_state(loader_generator, loader_state)


def content_of(batch: Any) -> list | None:
    """The tensors, numbers and texts in `batch`, and None in the place of what a checkpoint cannot hold."""
    if batch is None:
        return None
    content: list[Any] = []
    for leaf in leaves(batch):
        if type(leaf) is torch.Tensor:  # files with other classes would not be loaded
            content.append(leaf.detach().cpu().clone())  # a part of a larger tensor would be saved with all of it
        elif type(leaf) in (bool, int, float, complex, str, bytes):
            content.append(leaf)
        else:
            content.append(None)
    return content


def put_back(content: list | None, batch: Any) -> Any:
    """`batch`, which has been read again, with the saved content, if there is any, in the place of the new one."""
    if content is None:
        return batch
    if len(list(leaves(batch))) != len(content):
        logger.warning("the batch after a checkpoint has another structure now: its random numbers are other ones")
        return batch
    saved = iter(content)

    def choose(leaf: Any) -> Any:
        kept = next(saved)
        return leaf if kept is None else kept

    return map_nested(choose, batch)
