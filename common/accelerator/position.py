"""Where a loader stands in an epoch, and how the next pass, a `for` over the loader, goes on from there.

By default a script says where it goes on: `loader.set_epoch(e)` and `skip_first_batches(loader, n)`. With
`DataLoaderConfiguration(use_stateful_dataloader=True)` checkpoints hold the position, and the next pass continues with
the batch after the last one that was yielded: in any order that one of torch's samplers draws, and on any number of
processes with the same samples per step.

The order is not saved, but the states of the generators when it was drawn: `drawn_from`, here S. An epoch of six
batches, with a checkpoint after the third, when the generators are in the states C:

    the run        S  a b c are drawn and yielded     C  d e f
    the resumed    S  a b c are drawn and left out    C  d e f

The resumed pass remembers C, to which `load_state` has put the generators (`restored_generators`). It puts them to S,
draws the order again, leaves out a, b and c (`DrawnBatches`), and goes back to C.

At C batch d has been read already, and its data set or its collator may have drawn random numbers for it. So its
tensors, numbers and texts are saved too (`content_of`). The resumed pass reads d again, for its structure and for what
cannot be saved, and puts the saved content in the place of the new one (`put_back`).
"""

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple

import torch

from common.nested import leaves, map_nested

from .sampler import BatchSamplerShard, ShortStep, Step, generator_of, innermost_sampler, set_state, state_of
from .utils.random import get_random_states, set_random_states

logger = logging.getLogger(__name__)


class LastYielded(NamedTuple):
    """What is known of the batch that a loader has yielded last: see the properties of these names in the loader."""

    end_of_dataloader: bool = False
    remainder: int = -1
    short_step: ShortStep | None = None


class SavedContent(NamedTuple):
    """What a checkpoint holds of a pass's `read_ahead` and `first_rows`: for each the list of `content_of`, or None."""

    read_ahead: list | None
    first_rows: list | None


@dataclass(eq=False)
class Pass:
    """One `for` over a loader, from its beginning to its end.

    Attributes:
        epoch, step: so many steps of the epoch were yielded, or left out at its beginning.
        was_interrupted: the pass is the first after loading, and begins within the epoch.
        saved: where the pass goes on from a position in a checkpoint, what that holds of the batches. None in other
            passes, and as soon as the first step is read again.
        drawn_from: the states of torch's generator and of the sampler's own, which may be None, right before the order
            was drawn; None for streams, and before that.
        short_steps: the ShortSteps of the batches whose numbers torch's loader has drawn, and which are not read yet.
            The example at the head of `sampler.py` shows their way.
        read_ahead: the batch that was read and not yielded.
        first_rows: what a dispatched last step is filled up with.
        last_yielded: what the loader's properties say. It is set right before a batch is yielded.
    """

    epoch: int
    step: int = 0
    was_interrupted: bool = False
    saved: SavedContent | None = None
    drawn_from: tuple[torch.Tensor, torch.Tensor | None] | None = None
    short_steps: deque[ShortStep | None] = field(default_factory=deque)
    read_ahead: Any = None
    first_rows: Any = None
    last_yielded: LastYielded = field(default_factory=LastYielded)

    def content_to_save(self) -> SavedContent:
        """What a checkpoint that is made now holds of the batches."""
        if self.saved is not None:
            return self.saved
        return SavedContent(content_of(self.read_ahead), content_of(self.first_rows))


@dataclass(eq=False)
class Progress:
    """Where the loops over a loader stand. It and what `skip_first_batches` makes of it share one Progress.

    Attributes:
        epoch: the one that the next pass visits.
        passes: those that have begun and not ended. A script may begin one within another; the one that yielded a batch
            last stands last.
        is_loaded: a checkpoint was loaded, and no pass has begun since.
        resumed: the pass that goes on from that checkpoint, if the checkpoint holds a position. The next pass is this
            one, unless that visits another epoch.
    """

    epoch: int = 0
    passes: list[Pass] = field(default_factory=list)
    is_loaded: bool = False
    resumed: Pass | None = None

    @property
    def current(self) -> Pass:
        """The pass that yielded a batch last; outside of a loop the next one, as it is if it skips nothing."""
        if self.passes:
            return self.passes[-1]
        return self._next_pass()

    def begin_pass(self, num_to_skip: int) -> Pass:
        """A pass over the epoch without the steps to skip or, after loading, from the loaded position on."""
        this_pass = self._next_pass()
        if num_to_skip not in (0, this_pass.step):  # a script that skips after loading knows better where to go on
            this_pass = replace(this_pass, step=num_to_skip)
            if this_pass.saved is not None:
                this_pass.saved = this_pass.saved._replace(read_ahead=None)
        this_pass.was_interrupted = self.is_loaded and this_pass.step > 0
        self.is_loaded = False
        self.resumed = None
        self.passes.append(this_pass)
        return this_pass

    def make_current(self, yielding: Pass) -> None:
        """Put the pass that is about to yield a batch in the last place."""
        if self.passes[-1] is not yielding:
            self.passes.remove(yielding)
            self.passes.append(yielding)

    def _next_pass(self) -> Pass:
        if self.resumed is not None and self.resumed.epoch == self.epoch:
            return self.resumed
        return Pass(self.epoch)


@dataclass
class DrawnBatches:
    """The batch sampler of torch's loader: the batches of a pass, in an order that can be drawn again.

    torch returns batches in the order in which it has drawn their numbers, so the first of the pass's `short_steps`
    belongs to the next batch. torch calls `iter` without an argument, so `read_next` is called before.

    It does not know the loader. A loader whose workers stay alive keeps torch's iterator, which keeps this object. In a
    circle only the garbage collector would end the workers, and then torch waits five seconds for each.

    Attributes:
        batches: a BatchSamplerShard, or what the script reads by: batches of sample numbers, or single numbers.
        batches_per_step: how many of them make a step.
        is_stateful: checkpoints hold the position, so nothing may be drawn before `drawn_from` is noted.
        next_pass: the pass that reads next.
    """

    batches: Any
    batches_per_step: int
    is_stateful: bool
    next_pass: Pass | None = None

    def read_next(self, next_pass: Pass) -> None:
        """Let torch read this pass when it calls `iter` next; with new workers it calls that twice."""
        self.next_pass = next_pass

    def __iter__(self) -> Iterator[Any]:
        this_pass = self.next_pass
        if this_pass is None:
            raise RuntimeError("DrawnBatches needs read_next before iter")
        if isinstance(self.batches, BatchSamplerShard):
            return self._draw(self.batches.steps(), this_pass)
        batches = self.batches
        if this_pass.step == 0 and not self.is_stateful:
            # Some batch samplers draw when their iterator is made. In the original that is before torch draws a seed,
            # so `iter` is called here, early, to draw in the same order.
            batches = iter(batches)
        return self._draw(self._steps_of_one_process(batches), this_pass)

    def _draw(self, steps: Iterator[Step], this_pass: Pass) -> Iterator[Any]:
        sampler = innermost_sampler(self.batches)
        if this_pass.drawn_from is None:
            this_pass.drawn_from = torch.get_rng_state(), state_of(generator_of(sampler))
        else:
            state, state_of_sampler = this_pass.drawn_from
            torch.set_rng_state(state)
            set_state(generator_of(sampler), state_of_sampler)
            if state_of_sampler is None and generator_of(sampler) is not None:
                sampler.generator = None  # as it was on the one process that drew the order first
        for batch, short_step in islice(steps, this_pass.step * self.batches_per_step, None):
            this_pass.short_steps.append(short_step)
            yield batch

    def _steps_of_one_process(self, batches: Iterable[Any]) -> Iterator[Step]:
        """Each batch as a step; a short one if it has another size than the batch sampler says, where that says one."""
        full_size = getattr(self.batches, "batch_size", None)
        for batch in batches:
            short_step = None
            if full_size is not None and len(batch) != full_size:
                rows = (len(batch),)
                short_step = ShortStep(rank=0, rows=rows, real=rows)
            yield Step(batch, short_step)


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
