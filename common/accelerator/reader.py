"""Torch's own loader, which reads for a prepared one: how it is made, and when it draws."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from .position import Position
from .sampler import SkipBatchSampler, Step, steps_of
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


@dataclass(eq=False)
class Order:
    """The steps of one pass: those of an index sampler or of a stream, from the place where the pass begins.

    It must not hold the prepared loader. That one keeps a Reader while workers stay alive, and in a circle of
    references they would end only when the garbage collector runs. Torch waits five seconds for each.
    """

    position: Position
    index_sampler: Any  # A stream is read without it.
    skipped: int  # batches that are left out

    def draw(self) -> Iterator[Step]:
        """The steps of the index sampler.

        As in the original, `iter` of a script's own sampler is called at once, but where steps are left out.
        """
        return steps_of(SkipBatchSampler(self.index_sampler, self.skipped) if self.skipped > 0 else self.index_sampler)

    def skip(self, steps: Iterator[Step]) -> Iterator[Step]:
        """`steps` of a stream, which is read from its beginning."""
        return islice(steps, self.skipped, None)


class Reader:
    """Torch's loader with the data and the options of a prepared `loader`, for a pass in this `order`.

    The prepared loader shows scripts their own batch sampler, which torch forbids to change after `__init__`. Torch's
    has a PassSampler in its place. A sampler that draws before the seed gets other numbers than one that draws after
    it. When a pass begins, after the states of `rng_types` are taken over from rank 0:

        torch's loader calls                what is drawn
        iter(sampler)                       the order of a script's own sampler, if its `iter` draws
        random_(generator=…)                the seed; workers that stay alive draw it only when they begin
        iter(sampler), with new workers     the order of such a sampler again
        next(…) for the first batch         the order by the samplers of `sampler.py`, and any in a stateful loader
    """

    def __init__(self, loader: DataLoader, order: Order) -> None:
        self._pass_sampler = PassSampler(order)
        arguments = loading_arguments(loader, self._pass_sampler)
        if isinstance(loader.dataset, StreamShard):  # It makes the batches by itself.
            collate_fn = partial(collate_step, loader.collate_fn)
            arguments |= {"batch_size": None, "drop_last": False, "collate_fn": collate_fn}
        self._loader = DataLoader(loader.dataset, **arguments)
        self._has_drawn_seed = False

    def replace_order(self, order: Order) -> None:
        """Read another pass. Torch's loader keeps its sampler as long as its workers stay alive."""
        self._pass_sampler.order = order

    def read(self) -> Iterator[Step]:
        """The steps of the pass, each with its batch."""
        order = self._pass_sampler.order
        batches = iter(self._loader)  # This calls `iter` of the PassSampler, perhaps twice.
        if isinstance(self._loader.dataset, StreamShard):  # It makes Steps by itself.
            return order.skip(batches)
        if isinstance(self._loader.dataset, IterableDataset):
            return order.skip(Step(batch, None) for batch in batches)
        return map(self._pass_sampler.step_with, batches)

    def draw_only(self) -> None:
        """Draw, on another process, what the main process of a dispatching loader draws, and read nothing.

            draw in each pass         a seed                     the order, but of a stream
            without workers           all ranks                  rank 0 alone
            workers                   all ranks                  all ranks
            workers that stay alive   all, in the first pass     all ranks

        So, as in the original, the generators of all ranks stay alike, unless an order without workers is drawn from
        torch's. No workers are started.
        """
        if self._loader.num_workers == 0:
            self.read()  # This draws the seed and, as in the original, calls `iter` of a stream.
            return
        order = self._pass_sampler.order
        if not self._has_drawn_seed:
            order.draw()
            torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)
            self._has_drawn_seed = True
        # Workers are given their first batches when a pass begins.
        batches_ahead = self._loader.num_workers * (self._loader.prefetch_factor or 0)
        for _ in islice(order.draw(), batches_ahead):
            pass


@dataclass(eq=False)
class PassSampler:
    """The batch sampler of torch's loader: the sample numbers of one pass.

    Torch's loader gets the sample numbers alone, and returns the batches in their order. Until then the steps wait.
    """

    order: Order
    waiting: deque[Step] = field(default_factory=deque)

    def __iter__(self) -> Iterator[Any]:
        self.waiting.clear()
        return map(self.sample_numbers, self.order.draw())

    def sample_numbers(self, step: Step) -> Any:
        """Those of this step, which waits for its batch."""
        self.waiting.append(step)
        return step.content

    def step_with(self, batch: Any) -> Step:
        """The step of this batch, which torch's loader has just returned."""
        return self.waiting.popleft()._replace(content=batch)
