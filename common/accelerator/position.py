"""Where a loader stands: its epoch, and the passes over it. `resumption.py` adds what a checkpoint brings."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .sampler import ShortStep, SkipBatchSampler, Step, steps_of


class Pass:
    """One `for` over a loader.

    Attributes:
        epoch: the one that it visits.
        first_step: how many steps of the epoch it leaves out before its first batch.
        is_resumed_within_epoch: True if it is the first one after a checkpoint was loaded, and begins within its epoch.
        has_saved_order: True if that checkpoint says how the order of the epoch was drawn. Only a StatefulPass has one.
        step: how many steps of the epoch were left out or yielded.
        short_step: the ShortStep of the step that was yielded last, if it has one.
        read_ahead: the step that was read and not yielded; None after the last one.
        end_of_dataloader: the loop sets it to True at the last batch. A script may set it to False.
    """

    def __init__(self, epoch: int, first_step: int) -> None:
        self.epoch = epoch
        self.first_step = first_step
        self.is_resumed_within_epoch = False
        self.has_saved_order = False
        # The loop sets these for each batch that it yields.
        self.step = first_step
        self.short_step: ShortStep | None = None
        self.read_ahead: Step | None = None
        self.end_of_dataloader = False

    @property
    def is_over(self) -> bool:
        """True if the batch that was yielded last is the last one of the epoch."""
        return self.step > self.first_step and self.read_ahead is None

    def draw_steps(self, batches: Any, batches_read_per_step: int) -> Iterator[Step]:
        """A Step for each of the `batches` of sample numbers that is read. See `steps_of` for when they are drawn."""
        if self.first_step > 0:
            batches = SkipBatchSampler(batches, self.first_step * batches_read_per_step)
        return steps_of(batches)

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint: the epoch that a run begins with when it loads it."""
        return {"epoch": self.epoch + 1 if self.is_over else self.epoch}

    # These three are for a StatefulPass, which goes on with exactly what the saved run had. They change nothing here.

    def begin_order(self, sampler: Any) -> None:
        """Called when `sampler` is about to draw the order."""

    def put_back_read_ahead(self, steps: Iterator[Step]) -> Iterator[Step]:
        """The `steps` of a resumed pass, the first with the batch that the saved run had read ahead."""
        return steps

    def keep_first_rows(self, rows: Any) -> Any:
        """The rows that fill up a dispatched last step; `rows` are those of the first step of this pass."""
        return rows


@dataclass(eq=False)
class Progress:
    """The epoch of a loader and the passes over it. The loaders that `skip_first_batches` makes of it share them.

    Attributes:
        epoch: the one that the next pass visits.
        first_step_of_epochs: how many steps were left out of every epoch when the loader was prepared.
        passes: those that have begun and not ended, perhaps one within another. The current one stands last.
        checkpoint: the `state_dict` of the loader that was loaded last; `{}` if a checkpoint was loaded that has none.
            It is None from the beginning of the next pass on.
    """

    epoch: int = 0
    first_step_of_epochs: int = 0
    passes: list[Pass] = field(default_factory=list)
    checkpoint: dict[str, Any] | None = None

    @property
    def current(self) -> Pass:
        """The last of `passes`; outside of a loop a new Pass that never begins, so that `state_dict` has one rule."""
        return self.passes[-1] if self.passes else self.next_pass(self.first_step_of_epochs)

    def next_pass(self, first_step: int) -> Pass:
        """The next pass, over a loader that leaves out so many steps of every epoch."""
        return Pass(self.epoch, first_step)

    def begin_pass(self, first_step: int) -> Pass:
        """Begin the next pass, over a loader that leaves out so many steps of every epoch."""
        this_pass = self.next_pass(first_step)
        begins_within_epoch = this_pass.first_step > self.first_step_of_epochs
        this_pass.is_resumed_within_epoch = begins_within_epoch and self.checkpoint is not None
        self.checkpoint = None
        self.passes.append(this_pass)
        return this_pass

    def follow_checkpoint(self, state: dict[str, Any]) -> None:
        """Let the next pass go on from a loader's `state_dict`. With `{}` it begins at the start of its epoch."""
        self.checkpoint = state
        self.epoch = state.get("epoch", self.epoch)


class PassSampler:
    """The batch sampler of torch's loader: the batches of sample numbers of the pass that begins.

    Torch's loader reads by the sample numbers alone, and returns the batches in their order. So the Steps of these
    numbers are kept until then, and `steps_with` puts each batch into its Step.

    Workers that stay alive keep this object for all passes, so it finds the pass that begins in the loader's Progress.
    It does not hold the loader: in such a circle of references the workers would end only when the garbage collector
    runs, and torch waits five seconds for each.

    Args:
        batches: a BatchSamplerShard, or what the script reads by: batches of sample numbers, or single numbers.
        batches_read_per_step: how many of them are read for a step, see DataLoaderShard.
    """

    def __init__(self, batches: Any, batches_read_per_step: int, progress: Progress) -> None:
        self.batches = batches
        self.batches_read_per_step = batches_read_per_step
        self.progress = progress
        self.kept_steps: deque[Step] = deque()

    def __iter__(self) -> Iterator[Any]:
        """The sample numbers of each batch."""
        self.kept_steps.clear()  # A pass over the same workers that ended early may have left some.
        return self._keep(self.progress.passes[-1].draw_steps(self.batches, self.batches_read_per_step))

    def _keep(self, steps: Iterator[Step]) -> Iterator[Any]:
        for step in steps:
            self.kept_steps.append(step)
            yield step.content

    def steps_with(self, batches: Iterator[Any]) -> Iterator[Step]:
        """The steps with the `batches` that torch's loader has read, in the place of their sample numbers."""
        for batch in batches:
            yield self.kept_steps.popleft()._replace(content=batch)
