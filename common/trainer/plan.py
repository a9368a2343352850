"""How long a training is: epochs, steps, and the micro-batches of each step."""

import math
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from common.trainer.arguments import TrainingArguments


class TrainingPlan(NamedTuple):
    """The length of a training.

    Attributes:
        num_epochs: epochs that are begun; the last one may end early.
        steps_per_epoch: optimizer steps in a whole epoch.
        batches_per_epoch: micro-batches of each rank in a whole epoch.
        max_steps: optimizer steps of the whole training.
        accumulation: micro-batches of each rank in a step, but for the last step of an epoch, which may have fewer.
        num_examples: samples in an epoch, of all ranks.
        num_samples: samples in the whole training, of all ranks, for the speed that is logged.
    """

    num_epochs: int
    steps_per_epoch: int
    batches_per_epoch: int
    max_steps: int
    accumulation: int
    num_examples: int
    num_samples: float

    def window_sizes(self, batches_done: int) -> Iterator[int]:
        """The micro-batches of each step that is left of an epoch, `batches_done` of which are done."""
        for done in range(batches_done, self.batches_per_epoch, self.accumulation):
            yield min(self.accumulation, self.batches_per_epoch - done)

    def ends_step(self, batches_done: int) -> bool:
        """Whether a step is complete when so many micro-batches of the epoch are done."""
        return batches_done % self.accumulation == 0 or batches_done == self.batches_per_epoch


def make_plan(args: TrainingArguments, loader: Any, num_processes: int) -> TrainingPlan:
    """The length of a training with `args` on this rank's `loader`, as `transformers` counts it.

    Raises:
        ValueError: for a loader without a batch or without a length, if `args.max_steps` is not set.
    """
    accumulation = args.gradient_accumulation_steps
    batches_per_epoch = _length(loader)
    samples_per_step = args.per_device_train_batch_size * accumulation * num_processes
    if not batches_per_epoch:
        if args.max_steps <= 0:
            raise ValueError(
                "the training set has no batch or no length, so the number of steps is not known: set max_steps"
            )
        return TrainingPlan(
            num_epochs=sys.maxsize,
            steps_per_epoch=args.max_steps,
            batches_per_epoch=args.max_steps * accumulation if batches_per_epoch is None else 0,
            max_steps=args.max_steps,
            accumulation=accumulation,
            num_examples=samples_per_step * args.max_steps,
            num_samples=samples_per_step * args.max_steps,
        )
    steps_per_epoch = math.ceil(batches_per_epoch / accumulation)
    num_examples = _length(getattr(loader, "dataset", None)) or batches_per_epoch * args.per_device_train_batch_size
    if args.max_steps > 0:
        max_steps = args.max_steps
        num_epochs = math.ceil(max_steps / steps_per_epoch)
        num_samples = float(max_steps * samples_per_step)
    else:
        max_steps = math.ceil(args.num_train_epochs * steps_per_epoch)
        num_epochs = math.ceil(args.num_train_epochs)
        num_samples = num_examples * args.num_train_epochs
    return TrainingPlan(
        num_epochs=num_epochs,
        steps_per_epoch=steps_per_epoch,
        batches_per_epoch=batches_per_epoch,
        max_steps=max_steps,
        accumulation=accumulation,
        num_examples=num_examples,
        num_samples=num_samples,
    )


def _length(data: Any) -> int | None:
    """The length of a loader or a dataset; None where it has none, as a stream."""
    try:
        return len(data)
    except TypeError:
        return None
