"""Where a loader stands: its epoch, the passes over it, and the Position that a checkpoint holds."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from .resumption import order_states, rewind, saved_leaves, saved_rows
from .sampler import ShortStep, Step


class Position(NamedTuple):
    """A place in an epoch. With `use_stateful_dataloader` checkpoints hold it, see `resumption.py`.

    Attributes:
        epoch: the number of the epoch.
        steps_done: how many steps of the epoch were left out or yielded; 0 if it has not begun.
        is_over: True if the last of them was the last step of the epoch.
        drawn_from: the `order_states` from which the order was drawn; None if it is not drawn yet.
        read_ahead: `saved_leaves` of the batch that was read and not yielded.
        row_lists: names of the lists that have a row for each sample in dispatched batches; None before the first.
        first_rows: by name, what the first dispatched step holds in its first rows, to fill up the last one.
    """

    epoch: int
    steps_done: int = 0
    is_over: bool = False
    drawn_from: tuple[torch.Tensor, torch.Tensor | None] | None = None
    read_ahead: list | None = None
    row_lists: list[str] | None = None
    first_rows: dict[str, Any] | None = None

    @property
    def next_epoch(self) -> int:
        return self.epoch + int(self.is_over)


class Sharing(NamedTuple):
    """The process that a loader is for, how many processes share the data, and samples of all in a full step."""

    process_index: int
    num_processes: int
    step_size: int


def loaded_position(state: dict[str, Any], sharing: Sharing, sampler_class: str) -> Position:
    """The Position in the `state_dict` of a stateful loader, for one with this `sharing` and class of sampler."""
    position = Position(**{name: state[name] for name in Position._fields})
    saved = Sharing(**{name: state[name] for name in Sharing._fields})
    if position.steps_done > 0 and not position.is_over:
        if saved.step_size != sharing.step_size:
            raise ValueError(f"an epoch of {saved.step_size} samples per step cannot go on with {sharing.step_size}")
        if state["sampler_class"] != sampler_class:
            raise ValueError(f"an epoch in the order of a {state['sampler_class']} cannot go on by a {sampler_class}")
    if saved.step_size != sharing.step_size:
        return position._replace(steps_done=0)  # If the script sets the finished epoch, it begins anew.
    if saved != sharing:
        return position._replace(read_ahead=None)  # It was a batch of another process.
    return position


class Pass:
    """One `for` over a loader.

    Attributes:
        start: where it begins: behind the steps that the loader leaves out, or where a checkpoint stopped.
        is_resumed: True if it is the rest of an epoch that another run has begun.
        steps_done: how many steps of the epoch were left out or yielded.
        short_step: the ShortStep of the step that was yielded last, if it has one.
        read_ahead: the Step that was read and not yielded; None after the last one.
        end_of_dataloader: True from the last batch on. A script may set it.
        drawn_from: see Position.
        row_lists, first_rows: see Position. The main process decides them, in the first step that it dispatches.
    """

    def __init__(self, start: Position, is_resumed: bool = False) -> None:
        self.start = start
        self.is_resumed = is_resumed
        self.steps_done = start.steps_done
        self.short_step: ShortStep | None = None
        self.read_ahead: Step | None = None
        self.end_of_dataloader = False
        self.drawn_from = start.drawn_from
        self.row_lists: Any = start.row_lists
        self.first_rows: Any = start.first_rows

    @property
    def is_over(self) -> bool:
        """True if the batch that was yielded last is the last one of the epoch, whatever the script has set."""
        return self.steps_done > self.start.steps_done and self.read_ahead is None

    def begin_order(self, sampler: Any) -> None:
        """Note the states from which `sampler` is about to draw the order; those of a checkpoint are restored first."""
        if self.start.drawn_from is not None:
            rewind(sampler, self.start.drawn_from)
        self.drawn_from = order_states(sampler)

    def advance(self, short_step: ShortStep | None, read_ahead: Step | None) -> None:
        """Go on to the step that is about to be yielded, which may be a short one. The next one is `read_ahead`."""
        self.steps_done += 1
        self.short_step = short_step
        self.read_ahead = read_ahead
        if read_ahead is None:
            self.end_of_dataloader = True

    def position(self) -> Position:
        """The Position after the batch that was yielded last, or at the beginning of the pass."""
        if self.steps_done == self.start.steps_done:
            return self.start
        return self.start._replace(
            steps_done=self.steps_done,
            is_over=self.is_over,
            drawn_from=self.drawn_from,
            read_ahead=None if self.read_ahead is None else saved_leaves(self.read_ahead.content),
            row_lists=self.row_lists,
            first_rows=saved_rows(self.first_rows),
        )


@dataclass(eq=False)
class Progress:
    """The epoch of a loader and the passes over it. The loaders that `skip_first_batches` makes of it share them.

    Attributes:
        epoch: the one that the next pass visits.
        prepared_skip: steps that it leaves out as it was prepared; what `skip_first_batches` makes of it has more.
        passes: those that have begun and not ended, perhaps one within another. The current one stands last.
        was_left: True if an epoch has begun and not come to its end, here or in the run that saved the checkpoint.
        was_loaded: True if a checkpoint was loaded since the last pass began.
        loaded: the position in it, if it is that of a stateful loader.
    """

    epoch: int = 0
    prepared_skip: int = 0
    passes: list[Pass] = field(default_factory=list)
    was_left: bool = False
    was_loaded: bool = False
    loaded: Position | None = None

    @property
    def current(self) -> Pass:
        """The last of `passes`; outside of a loop a new Pass that never begins, so that `state_dict` has one rule."""
        if self.passes:
            return self.passes[-1]
        loaded = self.loaded
        if loaded is not None and self.epoch in (loaded.epoch, loaded.next_epoch):
            return Pass(loaded)
        return Pass(Position(self.epoch))

    def load(self, next_epoch: int, position: Position | None, was_left: bool) -> None:
        self.epoch = next_epoch
        self.was_left = was_left
        self.was_loaded = True
        self.loaded = position

    def begin_pass(self, skip: int) -> Pass:
        """Begin the next pass, over a loader that leaves out the first `skip` steps of every epoch.

        Where it begins:

            `loaded` is None, or of another epoch    behind what the loader skips
            else, if the loader skips
                as prepared, or up to there          at this position, with the batch that was read ahead
                to another step                      behind what it skips, in the order of the checkpoint

        It is the rest of an epoch of another run if that was left, and this pass leaves out more than was prepared.
        """
        loaded = self.loaded
        if loaded is None or loaded.epoch != self.epoch or loaded.steps_done == 0:
            start = Position(self.epoch, steps_done=skip)
        elif skip == self.prepared_skip or skip == loaded.steps_done:
            start = loaded
        else:
            start = loaded._replace(steps_done=skip, is_over=False, read_ahead=None)
        is_resumed = self.was_loaded and self.was_left and start.steps_done > self.prepared_skip
        self.was_left = True
        self.was_loaded = False
        self.loaded = None
        this_pass = Pass(start, is_resumed)
        self.passes.append(this_pass)
        return this_pass

    def end_epoch(self, this_pass: Pass) -> None:
        """Go on to the next epoch, because the pass has come to its end."""
        if self.was_loaded:  # That was within the pass, and the checkpoint says where the next one begins.
            return
        self.was_left = False
        # As in the original, a pass over no data is no epoch. A pass that leaves out all steps still ends its epoch.
        if this_pass.steps_done > 0:
            self.epoch += 1

    def make_current(self, this_pass: Pass) -> None:
        """Put it behind passes that a script has begun within it, and not ended."""
        self.passes.remove(this_pass)
        self.passes.append(this_pass)
