"""Exact resumption: how a loader goes on within an epoch, as if it had not been stopped.

With `DataLoaderConfiguration(use_stateful_dataloader=True)` checkpoints hold a Position. The next pass continues with
the batch after the last one that was yielded: in any order that is drawn as a whole when the pass begins, and on any
number of processes with the same samples per step.

The order is not saved, but the states of the generators when it was drawn: `drawn_from`, here S. An epoch of six
batches, with a checkpoint after the third, when the generators are in the states C:

    the run        S  a b c are drawn and yielded     C  d e f
    the resumed    S  a b c are drawn and left out    C  d e f

The resumed pass remembers C (`restored_generators`). It puts the generators to S (`rewind`), draws the order again,
leaves out a, b and c, and goes back to C.

At C batch d has been read already, perhaps with random numbers. So its tensors, arrays, numbers and texts are saved too
(`saved_leaves`). The resumed pass reads d again, for its structure and for what cannot be saved, and puts what is
saved in the place of the new (`put_back`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch

from common.nested import leaves, replace_leaves

from .logging import get_logger
from .sampler import Step, generator_of
from .utils.random import get_random_states, set_random_states

logger = get_logger(__name__)


def order_states(sampler: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The states of the generators from which `sampler` may draw an order: torch's and, if it has one, its own."""
    return torch.get_rng_state(), state_of(generator_of(sampler))


def rewind(sampler: Any, drawn_from: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    """Let `sampler` draw the order that it has drawn from these `order_states`."""
    torch_state, sampler_state = drawn_from
    torch.set_rng_state(torch_state)
    set_state(generator_of(sampler), sampler_state)
    if generator_of(sampler) is not None and sampler_state is None:
        # On several processes `prepare` has given it a generator. The order was drawn on one, where it had none.
        sampler.generator = None  # Until `restored_generators` puts it back.


def generator_states(sampler: Any, loader_generator: torch.Generator | None) -> dict[str, torch.Tensor | None]:
    """The states of the generators that a loader draws from, beside torch's, for its `state_dict`."""
    return {"sampler_generator": state_of(generator_of(sampler)), "loader_generator": state_of(loader_generator)}


def load_generator_states(state: dict[str, Any], sampler: Any, loader_generator: torch.Generator | None) -> None:
    """Put the generators into the states that `generator_states` has noted."""
    sampler_state = state["sampler_generator"]
    # The checkpoint's run had several processes, so `prepare` gave the sampler a generator. On one it gives none.
    if sampler_state is not None and hasattr(sampler, "generator") and sampler.generator is None:
        sampler.generator = torch.Generator()
    set_state(generator_of(sampler), sampler_state)
    set_state(loader_generator, state["loader_generator"])


def state_of(generator: torch.Generator | None) -> torch.Tensor | None:
    return None if generator is None else generator.get_state()


def set_state(generator: torch.Generator | None, state: torch.Tensor | None) -> None:
    """Put the generator into that state. Nothing happens where there is no generator, or no state."""
    if generator is not None and state is not None:
        generator.set_state(state)


@contextmanager
def restored_generators(
    device: torch.device | None, sampler: Any, loader_generator: torch.Generator | None
) -> Iterator[None]:
    """Restore all generators to where they are now, and the one that `sampler` has, whatever is done within."""
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
    """The tensors, arrays, numbers and texts in `batch`, and None in the place of what a checkpoint cannot hold."""
    if batch is None:
        return None
    saved: list[Any] = []
    for leaf in leaves(batch):
        if type(leaf) is torch.Tensor:  # Files with other classes would not be loaded.
            saved.append(leaf.detach().cpu().clone())  # A part of a larger tensor would be saved with all of it.
        elif type(leaf).__module__ == "numpy" and type(leaf).__name__ != "memmap" and leaf.dtype.kind in "biufc":
            saved.append(leaf.copy())
        else:
            saved.append(leaf if type(leaf) in (bool, int, float, complex, str, bytes) else None)
    return saved


def saved_rows(rows: dict[str, Any] | None) -> dict[str, Any] | None:
    """`rows`, as a checkpoint can hold them; None if there are none, or it cannot hold all of them."""
    saved = saved_leaves(rows)
    if saved is None or any(leaf is None for leaf in saved):
        return None
    return replace_leaves(rows, saved)


def put_back(saved: list | None, batch: Any) -> Any:
    """`batch`, which has been read again, with the `saved_leaves`, if there are any, in the place of the new ones."""
    if saved is None:
        return batch
    new_leaves = list(leaves(batch))
    if len(new_leaves) != len(saved):
        logger.warning("a saved batch is left out: the one read now has other entries", main_process_only=False)
        return batch
    for place, leaf in enumerate(saved):
        if isinstance(leaf, torch.Tensor) and isinstance(new_leaves[place], torch.Tensor):
            leaf = leaf.to(new_leaves[place].device)
        if leaf is not None:
            new_leaves[place] = leaf
    return replace_leaves(batch, new_leaves)


def put_back_read_ahead(saved: list | None, steps: Iterator[Step]) -> Iterator[Step]:
    """The `steps`. The first is read now, and gets the `saved` leaves of the batch that was read ahead, if any."""
    first = next(steps, None)
    if first is None:
        return steps
    return chain([first._replace(content=put_back(saved, first.content))], steps)
