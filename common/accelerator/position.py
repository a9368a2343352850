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
from typing import Any

import torch

from common.nested import leaves, map_nested

from .sampler import BatchSamplerShard, ShortStep, Step, generator_of, innermost_sampler
from .utils.random import get_random_states, set_random_states

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Pass:
    """One `for` over a loader, from its beginning to its end.

    Attributes:
        epoch, step: so many steps of the epoch were yielded, or left out at its beginning.
        is_over: the last of them was the last of the epoch.
        is_resumed: the pass goes on from a position in a checkpoint.
        drawn_from: the states of torch's generator and of the sampler's own, which may be None, right before the order
            was drawn; None for streams, and before that.
        read_ahead: the batch that was read and not yielded.
        first_rows: what a dispatched last step is filled up with. Where the pass is resumed, this and `read_ahead` are
            lists of saved content until the pass has read its first step.
        short_steps: the ShortSteps of the batches whose numbers torch's loader has drawn, and which are not read yet.
        remainder, short_step: of the batch that was yielded last, see these properties of the loader.
    """

    epoch: int
    step: int = 0
    is_over: bool = False
    is_resumed: bool = False
    drawn_from: tuple[torch.Tensor, torch.Tensor | None] | None = None
    read_ahead: Any = None
    first_rows: Any = None
    short_steps: deque[ShortStep | None] = field(default_factory=deque)
    remainder: int = -1
    short_step: ShortStep | None = None


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
            this_pass = replace(this_pass, step=num_to_skip, read_ahead=None)
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
    belongs to the next batch.

    It does not know the loader. A loader whose workers stay alive keeps torch's iterator, which keeps this object. In a
    circle only the garbage collector would end the workers, and then torch waits five seconds for each.

    Attributes:
        batches: a BatchSamplerShard, or what the script reads by: batches of sample numbers, or single numbers.
        batches_per_step: how many of them make a step.
        is_stateful: checkpoints hold the position, so nothing may be drawn before `drawn_from` is noted.
        this_pass: the pass that reads next. It is set before each, as the epoch of a sampler.
    """

    batches: Any
    batches_per_step: int
    is_stateful: bool
    this_pass: Pass = field(init=False)

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.batches, BatchSamplerShard):
            return self._draw(self.batches.steps(), self.this_pass)
        batches = self.batches
        if self.this_pass.step == 0 and not self.is_stateful:
            # Some batch samplers draw when their iterator is made. In the original that is before torch draws a seed.
            batches = iter(batches)
        return self._draw(self._steps_of_one_process(batches), self.this_pass)

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


def state_of(generator: torch.Generator | None) -> torch.Tensor | None:
    """The state of the generator, if there is one."""
    return None if generator is None else generator.get_state()


def set_state(generator: torch.Generator | None, state: torch.Tensor | None) -> None:
    """Put the generator into that state, if there are both."""
    if generator is not None and state is not None:
        generator.set_state(state)


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
