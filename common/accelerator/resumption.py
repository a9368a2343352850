"""Exact resumption: how a loader goes on within an epoch, as if it had not been stopped.

With `DataLoaderConfiguration(use_stateful_dataloader=True)` checkpoints hold a Position. The next pass continues with
the batch after the last one that was yielded: in any order that is drawn as a whole when the pass begins, and on any
number of processes with the same samples per step.

The order is not saved, but the states of the generators when it was drawn: `drawn_from`, here S. An epoch of six
batches, with a checkpoint after the third, when the generators are in the states C:

    the run        S  a b c are drawn and yielded     C  d e f
    the resumed    S  a b c are drawn and left out    C  d e f

The resumed pass remembers C (`restored_generators`). It puts the generators to S (`StatefulPass.begin_order`), draws
the order again, leaves out a, b and c, and goes back to C.

At C batch d has been read already, perhaps with random numbers. So its tensors, numbers and texts are saved too
(`saved_leaves`). The resumed pass reads d again, for its structure and for what cannot be saved, and puts what is
saved in the place of the new (`put_back`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch

from common.nested import leaves, replace_leaves

from .logging import get_logger
from .position import Pass, Progress
from .sampler import Step, generator_of, sampler_chain
from .utils.random import get_random_states, set_random_states

logger = get_logger(__name__)


class Position(NamedTuple):
    """A place in an epoch, as checkpoints hold it.

    Attributes:
        step: how many steps of the epoch were left out or yielded.
        is_over: True if the last of them was the last step of the epoch.
        drawn_from: the states of torch's and, if any, the sampler's generator, when the order was drawn.
        read_ahead: `saved_leaves` of the batch that was read and not yielded.
        first_rows: `saved_leaves` of the rows that fill up a dispatched last step.
    """

    epoch: int
    step: int = 0
    is_over: bool = False
    drawn_from: tuple[torch.Tensor, torch.Tensor | None] | None = None
    read_ahead: list | None = None
    first_rows: list | None = None


class Sharing(NamedTuple):
    """The process whose batches a loader reads, how many processes share them, and samples of all in a full step."""

    process_index: int
    num_processes: int
    step_size: int

    def adapted(self, state: dict[str, Any]) -> dict[str, Any]:
        """The loaded `state` as a loader that shares like this can follow it."""
        saved = Sharing(**{name: state[name] for name in self._fields})
        if saved.step_size != self.step_size:
            if state["step"] > 0 and not state["is_over"]:
                raise ValueError(f"an epoch of {saved.step_size} samples per step cannot go on with {self.step_size}")
            return state | {"step": 0}  # If the script sets the finished epoch, it begins anew.
        if saved != self:
            return state | {"read_ahead": None}  # It was a batch of another process.
        return state


class StatefulPass(Pass):
    """A pass whose Position goes into checkpoints.

    Attributes:
        start: where it begins. In a resumed pass it is that of the checkpoint.
        drawn_from: see Position.
        first_rows: the rows that fill up a dispatched last step: on the main process, after the first step was read.
    """

    def __init__(self, start: Position) -> None:
        super().__init__(start.epoch, start.step)
        self.has_saved_order = start.drawn_from is not None
        self.start = start
        self.drawn_from = start.drawn_from
        self.first_rows: Any = None

    def draw_steps(self, batches: Any, batches_read_per_step: int) -> Iterator[Step]:
        """The steps of a Pass, always drawn after torch's seed (see `steps_of`), also where workers stay alive.

        This is a generator function, so nothing here runs before torch has drawn its seed.
        """
        self.begin_order(sampler_chain(batches)[-1])
        yield from super().draw_steps(batches, batches_read_per_step)

    def begin_order(self, sampler: Any) -> None:
        """Note the states from which `sampler` draws the order. A resumed pass goes back first to those that are saved.

        On several processes `prepare` has given the sampler a generator. It is taken away if the order was drawn on one
        process, where it has none. `restored_generators` puts it back.
        """
        if self.start.drawn_from is not None:
            torch_state, sampler_state = self.start.drawn_from
            torch.set_rng_state(torch_state)
            set_state(generator_of(sampler), sampler_state)
            if generator_of(sampler) is not None and sampler_state is None:
                sampler.generator = None
        self.drawn_from = torch.get_rng_state(), state_of(generator_of(sampler))

    def put_back_read_ahead(self, steps: Iterator[Step]) -> Iterator[Step]:
        """The `steps`. The first is read now, and gets the leaves that the saved run had read ahead, if any."""
        first = next(steps, None)
        if first is None:
            return steps
        return chain([first._replace(content=put_back(self.start.read_ahead, first.content))], steps)

    def keep_first_rows(self, rows: Any) -> Any:
        """Note `rows` as `first_rows`. In a resumed pass these are the rows of the epoch's first step, as saved."""
        self.first_rows = put_back(self.start.first_rows, rows)
        return self.first_rows

    def state_dict(self) -> dict[str, Any]:
        """The Position after the batch that was yielded last, or at the beginning of the pass."""
        if self.step == self.first_step:
            return self.start._asdict()
        position = Position(
            epoch=self.epoch,
            step=self.step,
            is_over=self.is_over,
            drawn_from=self.drawn_from,
            read_ahead=None if self.read_ahead is None else saved_leaves(self.read_ahead.content),
            first_rows=saved_leaves(self.first_rows),
        )
        return position._asdict()


class StatefulProgress(Progress):
    """The Progress of a loader with `use_stateful_dataloader`."""

    def next_pass(self, first_step: int) -> StatefulPass:
        start = Position(self.epoch, first_step)
        loaded = self.checkpoint
        # A checkpoint of the beginning of an epoch says no more than its number.
        if loaded and loaded["epoch"] == self.epoch and loaded["step"] > 0:
            start = Position(**{name: loaded[name] for name in Position._fields})
            if first_step not in (self.first_step_of_epochs, start.step):
                # The script skips to another step, where the batch that was read ahead is of no use.
                start = start._replace(step=first_step, is_over=False, read_ahead=None)
        return StatefulPass(start)

    def follow_checkpoint(self, state: dict[str, Any]) -> None:
        super().follow_checkpoint(state)
        if state.get("is_over"):
            self.epoch += 1


def generator_states(sampler: Any, loader_generator: torch.Generator | None) -> dict[str, torch.Tensor | None]:
    """The states of the generators that a loader draws from, beside torch's, for its `state_dict`."""
    return {
        "sampler_generator": state_of(generator_of(sampler)),
        "loader_generator": state_of(loader_generator),
    }


def load_generator_states(state: dict[str, Any], sampler: Any, loader_generator: torch.Generator | None) -> None:
    """Put the generators into the states that `generator_states` has noted."""
    sampler_state = state["sampler_generator"]
    # The checkpoint's run had several processes, so `prepare` gave the sampler a generator. On one it gives none.
    if sampler_state is not None and hasattr(sampler, "generator") and sampler.generator is None:
        sampler.generator = torch.Generator()
    set_state(generator_of(sampler), sampler_state)
    set_state(loader_generator, state["loader_generator"])


def state_of(generator: torch.Generator | None) -> torch.Tensor | None:
    """The state of the generator, if there is one."""
    return None if generator is None else generator.get_state()


def set_state(generator: torch.Generator | None, state: torch.Tensor | None) -> None:
    """Put the generator into that state. Nothing happens where there is no generator, or no state."""
    if generator is not None and state is not None:
        generator.set_state(state)


@contextmanager
def restored_generators(
    device: torch.device | None, sampler: Any, loader_generator: torch.Generator | None
) -> Iterator[None]:
    """Restore all generators to where they are now, whatever is done within."""
    device = device or torch.device("cpu")
    random_states = get_random_states(device)
    sampler_generator = generator_of(sampler)
    states = generator_states(sampler, loader_generator)
    try:
        yield
    finally:
        set_random_states(device, random_states)
        if sampler_generator is not None:
            sampler.generator = sampler_generator
        load_generator_states(states, sampler, loader_generator)


def saved_leaves(batch: Any) -> list | None:
    """The tensors, numbers and texts in `batch`, and None in the place of what a checkpoint cannot hold."""
    if batch is None:
        return None
    saved: list[Any] = []
    for leaf in leaves(batch):
        if type(leaf) is torch.Tensor:  # Files with other classes would not be loaded.
            saved.append(leaf.detach().cpu().clone())  # A part of a larger tensor would be saved with all of it.
        else:
            saved.append(leaf if type(leaf) in (bool, int, float, complex, str, bytes) else None)
    return saved


def put_back(saved: list | None, batch: Any) -> Any:
    """`batch`, which has been read again, with the `saved_leaves`, if there are any, in the place of the new ones."""
    if saved is None:
        return batch
    new_leaves = list(leaves(batch))
    if len(new_leaves) != len(saved):
        logger.warning("a saved batch is left out: the one read now has other entries", main_process_only=False)
        return batch
    for place, leaf in enumerate(saved):
        if leaf is not None:
            new_leaves[place] = leaf
    return replace_leaves(batch, new_leaves)
