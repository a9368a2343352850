"""A training: its `Plan`, which says how long it is, and its `Progress`, which says how far it has come."""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from common.trainer.loading import length_of, samples_per_batch
from common.trainer.loss_log import LossLog
from common.trainer.training_args import TrainingArguments


@dataclass(frozen=True)
class Plan:
    """The length of a training. A step is an optimizer step; a batch is a micro-batch of one rank.

    Attributes:
        num_epochs: epochs that are begun; the last one may end early.
        max_steps: steps of the whole training.
        steps_per_epoch: steps of a whole epoch.
        batches_per_epoch: batches of a whole epoch.
        accumulation: batches of a step, but for the last step of an epoch, which may have fewer.
        samples_per_step: samples of all ranks in a whole step, for the speed that is logged.
        order_settings: the settings that decide which samples a step has, as JSON.
    """

    num_epochs: int
    max_steps: int
    steps_per_epoch: int
    batches_per_epoch: int
    accumulation: int
    samples_per_step: int
    order_settings: dict[str, Any]

    def window_sizes(self, batches_done: int) -> Iterator[int]:
        """The number of batches of each step that is left of an epoch."""
        for done in range(batches_done, self.batches_per_epoch, self.accumulation):
            yield min(self.accumulation, self.batches_per_epoch - done)

    def ends_step(self, batches_done: int) -> bool:
        """True if an optimizer step follows the last of so many batches of an epoch."""
        return batches_done % self.accumulation == 0 or batches_done == self.batches_per_epoch


def make_plan(args: TrainingArguments, loader: Any, num_processes: int) -> Plan:
    """A training on this rank's `loader`, as long as `transformers` would make it."""
    accumulation = args.gradient_accumulation_steps
    batches_per_epoch = length_of(loader)
    has_length = bool(batches_per_epoch)
    if not has_length:
        if args.max_steps <= 0:
            raise ValueError("the training set has no batch or no length, so max_steps must be set")
        batches_per_epoch = args.max_steps * accumulation
    steps_per_epoch = math.ceil(batches_per_epoch / accumulation)
    if args.max_steps > 0:
        max_steps = args.max_steps
        num_epochs = math.ceil(max_steps / steps_per_epoch) if has_length else sys.maxsize
    else:
        max_steps = math.ceil(args.num_train_epochs * steps_per_epoch)
        num_epochs = math.ceil(args.num_train_epochs)
    samples = samples_per_batch(loader, num_processes)
    return Plan(
        num_epochs=num_epochs,
        max_steps=max_steps,
        steps_per_epoch=steps_per_epoch,
        batches_per_epoch=batches_per_epoch,
        accumulation=accumulation,
        samples_per_step=samples * accumulation,
        order_settings={
            "batches_per_epoch": batches_per_epoch,
            "samples_per_batch": samples,
            "accumulation": accumulation,
            "seeds": [args.seed, args.data_seed],
        },
    )


@dataclass
class Progress:
    """The place that a training has come to, and its losses. Checkpoints hold them.

    Attributes:
        epoch: the epoch to go on with, counted from 0.
        batches: how many of its batches are done.
        epoch_ended: True from the end of an epoch to the next one's beginning. A run that is resumed from a checkpoint
            of this time must not call `on_epoch_end` twice.
        saved_steps: the steps of which this run has saved a checkpoint. Others in the folder are another run's.
    """

    plan: Plan
    loss_log: LossLog
    epoch: int = 0
    batches: int = 0
    epoch_ended: bool = False
    saved_steps: list[int] = field(default_factory=list)
