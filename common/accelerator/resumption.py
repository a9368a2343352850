"""Exact resumption: how a loader goes on within an epoch, as if it had not been stopped.

With `DataLoaderConfiguration(use_stateful_dataloader=True)` checkpoints hold a Position. The next pass continues with
the batch after the last one that was yielded: in any order that is drawn as a whole when the pass begins, and on any
number of processes with the same samples per step.

Neither the order is saved nor the batch that was read ahead, but the states of all generators before each of them was
made: S and B. An epoch of six batches, with a checkpoint after the third, when the generators are in the states C:

    the run        S  a b c are drawn and yielded     B  d is read     C  d e f
    the resumed    S  a b c are drawn and left out    B  d is read     C  d e f

A Replay notes S and B, and in the resumed run it first goes to those of the checkpoint.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any

import torch

from .position import Position
from .reader import Order
from .sampler import Step, generator_of, sampler_chain, steps_of
from .utils.random import get_random_states, set_random_states


@dataclass(eq=False)
class Replay(Order):
    """The order of one pass over a stateful loader: its draws are noted, and in a resumed run they are made again.

    S and B are noted in its Position. At the beginning that has those of the checkpoint, if any.
    """

    generators: "Generators"
    has_workers: bool  # which read with generators of their own, so B would say nothing

    def note_read_ahead(self, steps: Iterator[Step]) -> Iterator[Step]:
        """`steps`. When one is read, and it is not the first, the states B are noted from which it was read."""
        step = next(steps, None)
        while step is not None:
            yield step
            states = None if self.has_workers else self.generators.states()
            step = next(steps, None)
            # Not earlier: until the Position moves, it has the states of the step before. A script may save meanwhile.
            self.position.read_ahead_states = states

    def draw(self) -> Iterator[Step]:
        """The steps of the index sampler, whose order is drawn from S.

        This runs within torch's loader, right before it reads the samples. `iter` of a script's own sampler is called
        with the first step, and not before, so that S is noted right before the order is drawn.
        """
        # A script's batch sampler may have got another sampler in its `set_epoch`.
        self.generators.sampler = sampler_chain(self.index_sampler)[-1]
        if self.position.order_states is not None:
            self.generators.go_to_order(self.position.order_states)
        self.position.order_states = self.generators.states()
        yield from self.skip(steps_of(self.index_sampler))

    def skip(self, steps: Iterator[Step]) -> Iterator[Step]:
        """`steps` of the sampler or of a stream without the first ones. The others begin at B."""
        for _ in islice(steps, self.skipped):
            pass
        if self.position.read_ahead_states is not None:
            self.generators.go_to(self.position.read_ahead_states)
        yield from steps


class Generators:
    """The generators that a loader draws from: the sampler's, its own, and the global ones, also that of `device`."""

    def __init__(self, device: torch.device | None, sampler: Any, loader_generator: torch.Generator | None) -> None:
        self.device = device or torch.device("cpu")
        self.sampler = sampler
        self.loader_generator = loader_generator

    def own_states(self) -> dict[str, Any]:
        """The states of all but the global ones, which a checkpoint holds once for all loaders."""
        sampler_generator = generator_of(self.sampler)
        return {"sampler_generator": _state_of(sampler_generator), "loader_generator": _state_of(self.loader_generator)}

    def states(self) -> dict[str, Any]:
        return get_random_states(self.device) | self.own_states()

    def load_own_states(self, states: dict[str, Any]) -> None:
        """Go on from the `own_states` of another run."""
        sampler_state = states["sampler_generator"]
        # That run had several processes, so `prepare` gave the sampler a generator. On one it gives none.
        if sampler_state is not None and hasattr(self.sampler, "generator") and self.sampler.generator is None:
            self.sampler.generator = torch.Generator()
        _set_state(generator_of(self.sampler), sampler_state)
        _set_state(self.loader_generator, states["loader_generator"])

    def go_to(self, states: dict[str, Any]) -> None:
        set_random_states(self.device, states)
        self.load_own_states(states)

    def go_to_order(self, states: dict[str, Any]) -> None:
        """Go to where an order was drawn, for the sampler to draw it again. Only within `restored`."""
        self.go_to(states)
        if generator_of(self.sampler) is not None and states["sampler_generator"] is None:
            # That run had one process. On several, `prepare` has given the sampler a generator.
            self.sampler.generator = None

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore all generators to where they are now, and the one that the sampler has, whatever is done within."""
        states = self.states()
        sampler_generator = generator_of(self.sampler)
        try:
            yield
        finally:
            if sampler_generator is not None:
                self.sampler.generator = sampler_generator
            self.go_to(states)


def loaded_position(state: dict[str, Any], step_size: int, sampler_class: str) -> Position:
    """The Position in the `state_dict` of a stateful loader, for one with steps of this size and class of sampler."""
    position = Position(**{field.name: state[field.name] for field in fields(Position)})
    if position.steps_done > 0 and not position.is_over:
        if state["step_size"] != step_size:
            raise ValueError(f"an epoch of {state['step_size']} samples per step cannot go on with {step_size}")
        if state["sampler_class"] != sampler_class:
            raise ValueError(f"an epoch in the order of a {state['sampler_class']} cannot go on by a {sampler_class}")
    if state["step_size"] != step_size:
        position.steps_done = 0  # If the script sets the finished epoch, it begins anew.
    return position


def _state_of(generator: torch.Generator | None) -> torch.Tensor | None:
    return None if generator is None else generator.get_state()


def _set_state(generator: torch.Generator | None, state: torch.Tensor | None) -> None:
    """Put the generator into that state. Nothing happens where there is no generator, or no state."""
    if generator is not None and state is not None:
        generator.set_state(state)
