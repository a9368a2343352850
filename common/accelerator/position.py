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
"""

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from common.nested import leaves, map_nested

from .sampler import ShortStep, generator_of
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
        first_step: steps that were left out of every epoch when the loader was prepared.
        passes: those that have begun and not ended. A script may begin one within another. The one that began or
            yielded a batch last stands last.
        follows_checkpoint: True if a checkpoint was loaded and no pass has begun since.
        loaded_position: the position within an epoch that this checkpoint holds. None if there is no such checkpoint,
            or if it holds none, because the loader is not stateful or was not in a pass.
    """

    epoch: int = 0
    first_step: int = 0
    passes: list[Pass] = field(default_factory=list)
    follows_checkpoint: bool = False
    loaded_position: Position | None = None

    @property
    def current(self) -> Pass | None:
        """The pass that yielded a batch last; None outside of a loop."""
        return self.passes[-1] if self.passes else None

    def position(self) -> Position:
        """The position for a checkpoint: that of the current pass or, outside of a loop, where the next one begins."""
        return self.next_position(self.first_step) if self.current is None else self.current.position()

    def next_position(self, skipped_steps: int) -> Position:
        """The position at which the next pass begins, over a loader that leaves out so many steps of every epoch."""
        position = self.loaded_position
        if position is None or position.epoch != self.epoch:
            return Position(self.epoch, skipped_steps)
        # The script skips nothing more than it did at `prepare`, or just what the saved run has done.
        if skipped_steps in (self.first_step, position.step):
            return position
        # A script that skips after loading knows better where to go on. There the batch that was read ahead is no use.
        return position._replace(step=skipped_steps, read_ahead=None)

    def begin_pass(self, skipped_steps: int) -> Pass:
        """The pass that begins now. It follows the loaded checkpoint, if there is one, and later passes do not."""
        start = self.next_position(skipped_steps)
        is_resumed = self.follows_checkpoint and start.step > self.first_step
        has_saved_order = self.loaded_position is not None and self.loaded_position.epoch == start.epoch
        this_pass = Pass(start, is_resumed, has_saved_order, step=start.step)
        self.passes.append(this_pass)
        self.follows_checkpoint = False
        self.loaded_position = None
        return this_pass


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
    """Restore all generators to where they are now, whatever is drawn within."""
    device = device or torch.device("cpu")
    random_states = get_random_states(device)
    own = generator_of(sampler)
    own_state = state_of(own)
    loader_state = state_of(loader_generator)
    try:
        yield
    finally:
        set_random_states(device, random_states)
        if own is not None:  # PassSampler takes it away for an order that one process drew without.
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
