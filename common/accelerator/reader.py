"""Torch's own loader, which reads for a prepared one: how it is made, and when it draws."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice, tee
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from .sampler import Step
from .streams import StreamShard, collate_step

# These arguments of a DataLoader say how it loads, and not what.
LOADING_OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "pin_memory_device",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)


def loading_arguments(dataloader: DataLoader, index_sampler: Any) -> dict[str, Any]:
    """The arguments for a loader that reads as `dataloader` does, by `index_sampler` where it is not of a stream."""
    arguments = {name: getattr(dataloader, name) for name in LOADING_OPTIONS}
    if isinstance(dataloader.dataset, IterableDataset):
        arguments["batch_size"] = dataloader.batch_size
        arguments["drop_last"] = dataloader.drop_last
    elif dataloader.batch_sampler is None:
        arguments["sampler"] = index_sampler
        arguments["batch_size"] = None
    else:
        arguments["batch_sampler"] = index_sampler
    return arguments


class Reader:
    """Torch's loader with the data and the options of a prepared `loader`.

    The prepared loader shows scripts their own batch sampler, which torch forbids to change after `__init__`. Torch's
    has a PassSampler in its place. A sampler that draws before the seed gets other numbers than one that draws after
    it. When a pass begins, after the states of `rng_types` are taken over from rank 0:

        torch's loader calls                what is drawn
        iter(sampler)                       the order of a script's own sampler, if its `iter` draws
        random_(generator=…)                the seed; workers that stay alive draw it only when they begin
        iter(sampler), with new workers     the order of such a sampler again
        next(…) for the first batch         the order by the samplers of `sampler.py`, and any in a stateful loader
    """

    def __init__(self, loader: DataLoader) -> None:
        self._pass_sampler = PassSampler()
        arguments = loading_arguments(loader, self._pass_sampler)
        if isinstance(loader.dataset, StreamShard):  # It makes the batches by itself.
            collate_fn = partial(collate_step, loader.collate_fn)
            arguments |= {"batch_size": None, "drop_last": False, "collate_fn": collate_fn}
        self._loader = DataLoader(loader.dataset, **arguments)
        self._has_drawn_seed = False

    def read_stream(self) -> Iterator[Step]:
        """The steps of a stream from the first one."""
        batches = iter(self._loader)
        if isinstance(self._loader.dataset, StreamShard):  # It makes Steps by itself.
            return batches
        return (Step(batch, None) for batch in batches)

    def read_steps(self, draw_steps: Callable[[], Iterator[Step]]) -> Iterator[Step]:
        """The steps that `draw_steps` draws, each with its batch.

        `draw_steps` must not hold the prepared loader. That one keeps this object while workers stay alive, and in a
        circle of references they would end only when the garbage collector runs. Torch waits five seconds for each.
        """
        self._pass_sampler.draw_steps = draw_steps
        batches = iter(self._loader)  # This calls `iter` of the PassSampler, perhaps twice.
        return (next(self._pass_sampler.drawn)._replace(content=batch) for batch in batches)

    def draw_only(self, draw_steps: Callable[[], Iterator[Step]]) -> None:
        """Draw what `read_steps` draws where there are workers, and start none. Of a stream no order is drawn."""
        if not self._has_drawn_seed:
            draw_steps()
            torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)
            self._has_drawn_seed = True
        # Workers are given their first batches when a pass begins.
        batches_ahead = self._loader.num_workers * (self._loader.prefetch_factor or 0)
        for _ in islice(draw_steps(), batches_ahead):
            pass


class PassSampler:
    """The batch sampler of torch's loader: the sample numbers of the pass that began last.

    Torch's loader gets the sample numbers alone, and returns the batches in their order. The Steps of these batches
    come from `drawn`.
    """

    def __init__(self) -> None:
        self.draw_steps: Callable[[], Iterator[Step]] = partial(iter, ())
        self.drawn: Iterator[Step] = iter(())

    def __iter__(self) -> Iterator[Any]:
        steps, self.drawn = tee(self.draw_steps())
        return (step.content for step in steps)
