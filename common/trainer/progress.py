"""A training: its `Plan`, which says how long it is, and its `Progress`, which says how far it has come."""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from common.accelerator import Accelerator
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

    def goes_on_in_place(self, saved: dict[str, Any]) -> bool:
        """True if a run can go on in the very place where `saved`, the state of a Progress, was made.

            saved                               the run goes on at               gradients and their losses
            at a step's end                     that place                       are none
            where an epoch ended or was cut     the next epoch's beginning       of an incomplete window are kept
            where it was stopped in a step      the beginning of that step       are dropped
            with another order of samples       the end of as many whole steps   are dropped

        The first two are in place. All take the saved random states, so the third draws other numbers in its step.
        """
        return saved["order"] == self.order_settings and self.ends_step(saved["position"]["batches"])


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


class Progress:
    """The place that a training has come to, and its losses. `progress.json` in a checkpoint holds them.

    Attributes:
        epoch: the epoch to go on with, counted from 0.
        batches: how many of its batches are done.
        epoch_ended: True in a checkpoint that was made at an epoch's end, because a resumed run must not call
            `on_epoch_end` for it twice. The next epoch's beginning makes it False.
        saved_steps: the steps of which this run has saved a checkpoint. Others in the folder are another run's.
    """

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.plan = plan
        self.epoch = 0
        self.batches = 0
        self.epoch_ended = False
        self.loss_log = LossLog(device)
        self.saved_steps: list[int] = []

    def epochs_done(self) -> float:
        """The epochs up to this place, with a fraction within an epoch."""
        return self.epoch + self.batches / self.plan.batches_per_epoch

    def state_dict(self, accelerator: Accelerator, epoch_is_cut_short: bool) -> dict[str, Any]:
        """The content for a checkpoint, as JSON. All ranks must call this; it waits for the device."""
        # Nothing is left to train on in an epoch that a callback cuts short.
        is_done = epoch_is_cut_short and not self.epoch_ended
        batches = self.plan.batches_per_epoch if is_done else self.batches
        return {
            "position": {"epoch": self.epoch, "batches": batches, "epoch_ended": self.epoch_ended},
            "order": self.plan.order_settings,
            "loss_log": self.loss_log.state_dict(accelerator),
            "saved_steps": self.saved_steps,
        }

    def load_state_dict(self, saved: dict[str, Any], steps: int, accelerator: Accelerator) -> None:
        """Go on from what `state_dict` returned after so many steps, where `Plan.goes_on_in_place` says."""
        plan = self.plan
        position = saved["position"]
        if saved["order"] == plan.order_settings:
            self.epoch = position["epoch"]
            self.batches = position["batches"]
            if not plan.ends_step(self.batches):
                self.batches -= self.batches % plan.accumulation
        else:
            # All epochs are taken to be whole ones, as in `transformers`.
            self.epoch, steps_in_epoch = divmod(steps, plan.steps_per_epoch)
            self.batches = steps_in_epoch * plan.accumulation
        self.epoch_ended = position["epoch_ended"]
        self.loss_log.load_state_dict(saved["loss_log"], accelerator, keeps_gradients=plan.goes_on_in_place(saved))
        self.saved_steps = saved["saved_steps"]
