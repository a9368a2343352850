"""Where a loader stands: its epoch, the passes over it, and the Position that a checkpoint holds."""

from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

from .sampler import ShortStep


@dataclass
class Position:
    """A place in an epoch: that of a pass, with which it moves, or a checkpoint's, see `resumption.py`.

    Attributes:
        epoch: the number of the epoch.
        steps_done: how many steps of the epoch were left out or yielded; 0 if it has not begun.
        is_over: True if the last of them was the last step of the epoch.
        order_states: those of the generators before the order was drawn (S); None if it is not drawn yet.
        read_ahead_states: those before the batch was read that was read and not yielded (B). None where loader workers
            read, which have generators of their own.
    """

    epoch: int
    steps_done: int = 0
    is_over: bool = False
    order_states: dict[str, Any] | None = None
    read_ahead_states: dict[str, Any] | None = None

    @property
    def next_epoch(self) -> int:
        return self.epoch + int(self.is_over)


class Resumes(Enum):
    """How a pass goes on within an epoch that another run has begun."""

    NOT = auto()  # It begins an epoch, or leaves out its first steps.
    BY_HAND = auto()  # By `skip_first_batches`.
    AT_POSITION = auto()  # At the Position of a checkpoint, or in its order.


@dataclass(eq=False)
class Pass:
    """One `for` over a loader.

    Attributes:
        position: where it is: behind the steps that it leaves out, and then behind the batch that was yielded last.
        resumes: whether it is the rest of an epoch that another run has begun.
        short_step: the ShortStep of the batch that was yielded last, if it has one.
        end_of_dataloader: True at the last batch, as `position.is_over`, unless the script has set it.
    """

    position: Position
    resumes: Resumes
    short_step: ShortStep | None = None
    end_of_dataloader: bool = False


@dataclass(eq=False)
class Progress:
    """The epoch of a loader and the passes over it. The loaders that `skip_first_batches` makes of it share them.

    Attributes:
        epoch: the one that the next pass visits.
        epoch_is_set: True if the script has called `set_epoch`, here or in the run that saved the checkpoint.
        prepared_skip: steps that the loader leaves out as it was prepared, after `skip_first_batches` of a stream. What
            `skip_first_batches` makes of a prepared loader leaves out more.
        passes: those that have begun and not ended, perhaps one within another. The current one stands last.
        epoch_is_open: True if an epoch has begun and not come to its end, here or in the run that saved the checkpoint.
        loaded: where a checkpoint says to go on, until the next pass begins; None if none was loaded.
    """

    epoch: int = 0
    epoch_is_set: bool = False
    prepared_skip: int = 0
    passes: list[Pass] = field(default_factory=list)
    epoch_is_open: bool = False
    loaded: Position | None = None

    @property
    def current(self) -> Pass | None:
        """The last of `passes`; None outside of a loop."""
        return self.passes[-1] if self.passes else None

    @property
    def position(self) -> Position:
        """For checkpoints: that of the current pass; outside of a loop the loaded one, or an epoch's beginning."""
        current = self.current
        # A script may keep an iterator of an earlier epoch, which is no place in this one.
        if current is not None and current.position.epoch == self.epoch:
            return current.position
        loaded = self.loaded
        if loaded is not None and self.epoch in (loaded.epoch, loaded.next_epoch):
            return loaded
        return Position(self.epoch)

    def load(self, position: Position, epoch_is_open: bool, epoch_is_set: bool) -> None:
        self.epoch = position.next_epoch
        self.epoch_is_open = epoch_is_open
        self.epoch_is_set = self.epoch_is_set or epoch_is_set
        self.loaded = position

    def begin_pass(self, skip: int) -> Pass:
        """Begin the next pass, over a loader that leaves out the first `skip` steps of every epoch.

        what a checkpoint holds       skip                         where the pass begins        resumes
        a place in this epoch         prepared_skip or steps_done  at this place                AT_POSITION
        a place in this epoch         another number               there, in the saved order    AT_POSITION
        an open epoch, without that   more than prepared_skip      behind what it skips         BY_HAND
        nothing, or none was loaded   any number                   behind what it skips         NOT
        """
        loaded = self.loaded
        position = Position(self.epoch, steps_done=skip)
        resumes = Resumes.NOT
        if loaded is not None and loaded.epoch == self.epoch and loaded.steps_done > 0:
            resumes = Resumes.AT_POSITION
            position = replace(loaded)  # It moves, and copies of the loader begin at `loaded` too.
            if skip not in (self.prepared_skip, loaded.steps_done):
                position = replace(loaded, steps_done=skip, is_over=False, read_ahead_states=None)
        elif loaded is not None and self.epoch_is_open and skip > self.prepared_skip:
            resumes = Resumes.BY_HAND
        self.epoch_is_open = True
        self.loaded = None
        this_pass = Pass(position, resumes)
        self.passes.append(this_pass)
        return this_pass

    def advance(self, this_pass: Pass, short_step: ShortStep | None, is_last: bool) -> None:
        """Go on to the step that is about to be yielded."""
        this_pass.position.steps_done += 1
        this_pass.position.is_over = is_last
        this_pass.short_step = short_step
        if is_last:
            this_pass.end_of_dataloader = True
        # It becomes the current one again if a script has begun others within it, and not ended.
        self.passes.remove(this_pass)
        self.passes.append(this_pass)

    def end_epoch(self, this_pass: Pass) -> None:
        """Go on to the next epoch, because the pass has come to its end."""
        if self.loaded is not None:  # That was within the pass, and the checkpoint says where the next one begins.
            return
        self.epoch_is_open = False
        # As in the original, a pass over no data is no epoch. A pass that leaves out all steps still ends its epoch.
        if this_pass.position.steps_done > 0:
            self.epoch += 1
