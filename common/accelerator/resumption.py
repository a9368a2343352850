"""Exact resumption: how a loader goes on within an epoch, as if it had not been stopped.

With `DataLoaderConfiguration(use_stateful_dataloader=True)` checkpoints hold a Position. The next pass continues with
the batch after the last one that was yielded: in any order that is drawn as a whole when the pass begins, and on any
number of processes with the same samples per step.

Neither the order is saved nor the batch that was read ahead, but the states of all generators before each of them was
made: S and B. An epoch of six batches, with a checkpoint after the third, when the generators are in the states C:

    the run        S  a b c are drawn and yielded     B  d is read     C  d e f
    the resumed    S  a b c are drawn and left out    B  d is read     C  d e f

The resumed pass goes to S (`Pass.begin_order`) and to B (`Pass.begin_read_ahead`) within a block that ends in the
states C, from which it started (`Generators.restored`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .sampler import generator_of
from .utils.random import get_random_states, set_random_states


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


def _state_of(generator: torch.Generator | None) -> torch.Tensor | None:
    return None if generator is None else generator.get_state()


def _set_state(generator: torch.Generator | None, state: torch.Tensor | None) -> None:
    """Put the generator into that state. Nothing happens where there is no generator, or no state."""
    if generator is not None and state is not None:
        generator.set_state(state)
