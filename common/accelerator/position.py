"""The position of a loader in an epoch, and how the next pass, a `for` over the loader, goes on from there.

    Position      a place in an epoch, as a checkpoint holds it
    Pass          one `for` over a loader, which begins at a Position
    Progress      the epoch of a loader, its passes, and the Position in the checkpoint that the next one follows
    PassSampler   what torch's loader reads by: it draws the order of a pass, and skips its first steps

By default a script says where it goes on: `loader.set_epoch(e)` and `skip_first_batches(loader, n)`. With
`DataLoaderConfiguration(use_stateful_dataloader=True)` checkpoints hold the position, and the next pass continues with
the batch after the last one that was yielded: in any order that is drawn as a whole when the pass begins, and on any
number of processes with the same samples per step.

The order is not saved, but the states of the generators when it was drawn: `drawn_from`, here S. An epoch of six
batches, with a checkpoint after the third, when the generators are in the states C:

    the run        S  a b c are drawn and yielded     C  d e f
    the resumed    S  a b c are drawn and left out    C  d e f

The resumed pass remembers C, to which `load_state` has put the generators (`restored_generators`). It puts them to S
(`Pass.begin_order`), draws the order again, leaves out a, b and c (`PassSampler`), and goes back to C.

At C batch d has been read already, and its data set or its collator may have drawn random numbers for it. So its
tensors, numbers and texts are saved too (`content_of`). The resumed pass reads d again, for its structure and for what
cannot be saved, and puts the saved content in the place of the new one (`put_back`).
"""

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import torch

from common.nested import leaves, replace_leaves

from .sampler import ShortStep, Step, generator_of, sampler_chain, steps_of
from .utils.random import get_random_states, set_random_states

logger = logging.getLogger(__name__)


class Position(NamedTuple):
    """A place in an epoch, as checkpoints hold it.

    Attributes:
        epoch: the number of the epoch.
        step: steps of the epoch that were yielded or skipped.
        is_over: True if the last of them was the last step of the epoch.
        drawn_from: the states of torch's and, if any, the sampler's generator, when a stateful loader drew the order.
        read_ahead: `content_of` the batch that was read and not yielded.
        first_rows: `content_of` the rows that fill up a dispatched last step.
    """

    epoch: int
    step: int = 0
    is_over: bool = False
    drawn_from: tuple[torch.Tensor, torch.Tensor | None] | None = None
    read_ahead: list | None = None
    first_rows: list | None = None


class Pass:
    """One `for` over a loader.

    Attributes:
        start: where it begins.
        is_resumed: True if it follows a checkpoint and begins within an epoch.
        step: steps of the epoch that were yielded or skipped.
        short_step: the ShortStep of the step that was yielded last, if it has one.
        read_ahead: the step that was read and not yielded; None after the last one.
        end_of_dataloader: True from the last batch on, unless the script has set it.
        drawn_from: see Position.
        first_rows: the rows that fill up a dispatched last step: on the main process, after the first step was read.
    """

    def __init__(self, start: Position, is_resumed: bool = False) -> None:
        self.start = start
        self.is_resumed = is_resumed
        # The loop sets these for each batch that it yields.
        self.step = start.step
        self.short_step: ShortStep | None = None
        self.read_ahead: Step | None = None
        self.end_of_dataloader = False
        # These are set when the order is drawn, and when a DataLoaderDispatcher has read the first step.
        self.drawn_from = start.drawn_from
        self.first_rows: Any = None

    def begin_order(self, sampler: Any) -> None:
        """Note the states from which `sampler` draws the order; in a resumed pass, go back to those that were noted.

        On several processes `prepare` has given the sampler a generator. It is taken away if the order was drawn on one
        process, where it has none. `restored_generators` puts it back.
        """
        generator = generator_of(sampler)
        if self.drawn_from is None:
            self.drawn_from = torch.get_rng_state(), state_of(generator)
            return
        torch_state, sampler_state = self.drawn_from
        torch.set_rng_state(torch_state)
        set_state(generator, sampler_state)
        if generator is not None and sampler_state is None:
            sampler.generator = None

    def position(self) -> Position:
        """The position after the batch that was yielded last."""
        if self.step == self.start.step:
            return self.start
        return Position(
            epoch=self.start.epoch,
            step=self.step,
            is_over=self.read_ahead is None,
            drawn_from=self.drawn_from,
            read_ahead=None if self.read_ahead is None else content_of(self.read_ahead.content),
            first_rows=content_of(self.first_rows),
        )


@dataclass(eq=False)
class Progress:
    """The epoch of a loader and the loops over it. What `skip_first_batches` makes of a loader shares its Progress.

    Attributes:
        epoch: the one that the next pass visits.
        skipped_at_prepare: steps that were left out of every epoch when the loader was prepared.
        passes: those that have begun and not ended. A script may begin one within another. The current one stands last.
        follows_checkpoint: True if a checkpoint was loaded and no pass has begun since then.
        loaded: the position in that checkpoint, of a stateful loader, unless it is the beginning of an epoch.
    """

    epoch: int = 0
    skipped_at_prepare: int = 0
    passes: list[Pass] = field(default_factory=list)
    follows_checkpoint: bool = False
    loaded: Position | None = None

    @property
    def current(self) -> Pass:
        """The pass that began or yielded a batch last. Outside of a loop it is the next one, which has yielded none."""
        return self.passes[-1] if self.passes else Pass(self.next_position(self.skipped_at_prepare))

    def make_current(self, this_pass: Pass) -> None:
        """Note that `this_pass`, which has begun, yields a batch now."""
        self.passes.remove(this_pass)
        self.passes.append(this_pass)

    def begin_pass(self, skipped_steps: int) -> Pass:
        """Begin the next pass, over a loader that leaves out so many steps of every epoch."""
        start = self.next_position(skipped_steps)
        this_pass = Pass(start, is_resumed=self.follows_checkpoint and start.step > self.skipped_at_prepare)
        self.follows_checkpoint = False
        self.loaded = None
        self.passes.append(this_pass)
        return this_pass

    def next_position(self, skipped_steps: int) -> Position:
        """The position at which the next pass begins, over a loader that leaves out so many steps of every epoch."""
        loaded = self.loaded
        if loaded is None or loaded.epoch != self.epoch:
            return Position(self.epoch, skipped_steps)
        if skipped_steps == self.skipped_at_prepare:  # The script has not called `skip_first_batches` since then.
            return loaded
        if skipped_steps == loaded.step:  # It skips by hand to where the saved run was.
            return loaded
        # A script that skips elsewhere knows better where to go on. There the batch that was read ahead is no use.
        return loaded._replace(step=skipped_steps, is_over=False, read_ahead=None)


class PassSampler:
    """The batch sampler of torch's loader: the batches of the pass that begins, from where it begins.

    Torch's loader reads by the sample numbers alone, and returns the batches in their order. So the Steps of these
    numbers are kept until then, and `steps_with` puts each batch into its Step.

    Torch calls `iter` when a pass begins; with new workers it calls it twice. Workers that stay alive keep this object
    for all passes, so it finds the pass that begins in the loader's Progress, as the last one. It holds the Progress
    and not the loader, because loader, workers, sampler and loader would be a circle of references. Its workers would
    end only when the garbage collector runs, and torch waits five seconds for each.

    Args:
        batches: a BatchSamplerShard, or what the script reads by: batches of sample numbers, or single numbers.
        batches_per_step: how many of them make a step.
        progress: the loader's.
        is_stateful: checkpoints hold the position, so the order must be drawn from states that are known.
    """

    def __init__(self, batches: Any, batches_per_step: int, progress: Progress, is_stateful: bool) -> None:
        self.batches = batches
        self.batches_per_step = batches_per_step
        self.progress = progress
        self.is_stateful = is_stateful
        self.kept_steps: deque[Step] = deque()

    def __iter__(self) -> Iterator[Any]:
        """The sample numbers of each batch. Torch draws its seed between this call and the first of them.

        When a sampler draws random numbers in its own `iter`:

            from the first step   before the seed, if it is the outermost sampler on one process; else after it
            steps are skipped     after the seed, as in the original
            stateful              after the seed. So `drawn_from` is the state after the seed in every pass, whether one
                                  was drawn (new workers) or not (workers that stay alive).
        """
        this_pass = self.progress.current
        self.kept_steps.clear()  # A pass over the same workers that ended early may have left some.
        if self.is_stateful or this_pass.start.step > 0:
            return self._draw_later(this_pass)
        return self._keep(steps_of(self.batches))

    def _draw_later(self, this_pass: Pass) -> Iterator[Any]:
        """The sample numbers after the skipped steps, in an order that is drawn when torch asks for the first ones."""
        if self.is_stateful:
            this_pass.begin_order(sampler_chain(self.batches)[-1])
        skipped_batches = this_pass.start.step * self.batches_per_step
        rest = islice(steps_of(self.batches), skipped_batches, None)
        yield from self._keep(rest)

    def _keep(self, steps: Iterator[Step]) -> Iterator[Any]:
        for step in steps:
            self.kept_steps.append(step)
            yield step.content

    def steps_with(self, batches: Iterator[Any]) -> Iterator[Step]:
        """The steps with the `batches` that torch's loader has read, in the place of their sample numbers."""
        for batch in batches:
            yield self.kept_steps.popleft()._replace(content=batch)


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
    """Restore all generators to where they are now, whatever is drawn or put back within."""
    device = device or torch.device("cpu")
    random_states = get_random_states(device)
    sampler_generator = generator_of(sampler)
    sampler_state = state_of(sampler_generator)
    loader_state = state_of(loader_generator)
    try:
        yield
    finally:
        set_random_states(device, random_states)
        if sampler_generator is not None:
            sampler.generator = sampler_generator
        set_state(sampler_generator, sampler_state)
        set_state(loader_generator, loader_state)


def content_of(batch: Any) -> list | None:
    """The tensors, numbers and texts in `batch`, and None in the place of what a checkpoint cannot hold."""
    if batch is None:
        return None
    content: list[Any] = []
    for leaf in leaves(batch):
        if type(leaf) is torch.Tensor:  # Files with other classes would not be loaded.
            content.append(leaf.detach().cpu().clone())  # A part of a larger tensor would be saved with all of it.
        elif type(leaf) in (bool, int, float, complex, str, bytes):
            content.append(leaf)
        else:
            content.append(None)
    return content


def put_back(content: list | None, batch: Any) -> Any:
    """`batch`, which has been read again, with the saved content, if there is any, in the place of the new one."""
    if content is None:
        return batch
    new_leaves = list(leaves(batch))
    if len(new_leaves) != len(content):
        logger.warning("the saved batch does not fit the one read now: its augmentations differ from the first run's")
        return batch
    for place, saved in enumerate(content):
        if saved is not None:
            new_leaves[place] = saved
    return replace_leaves(batch, new_leaves)
