"""A training: its `Plan`, which says how long it is, and its `Progress`, which says how far it has come."""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common.accelerator import Accelerator
from common.trainer.loading import length_of, samples_per_batch
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


class LossLog:
    """The losses of this rank until they are logged, and the other values of a log.

    Every micro-batch brings its share of its step's loss. Here each of two steps has two micro-batches, with the shares
    1.0 and 1.5, 2.0 and 0.5, and is logged:

        after                 micro-batch 1   step 1   its log   micro-batch 3   step 2   its log
        since_log             1.0             2.5      0.0       2.0             2.5      0.0
        of_done_steps         0.0             2.5      0.0       0.0             2.5      0.0
        total                 0.0             0.0      2.5       2.5             2.5      5.0
        logged_step           0               0        1         1               1        2

    Attributes:
        since_log: the sum of the shares since the last log. It is a float32 tensor on the device, as in `transformers`.
        of_done_steps: this sum without the losses whose gradients no optimizer step has used yet.
        total: the sum of all logged losses, which are means over the ranks.
        logged_step: the step at which losses were last logged.
        learning_rate, grad_norm: of the last step. The norm is a tensor on the device.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.since_log = torch.tensor(0.0, device=device)
        self.of_done_steps = self.since_log
        self.total = 0.0
        self.logged_step = 0
        self.learning_rate = 0.0
        self.grad_norm: Tensor | float = 0.0

    def add(self, loss: Tensor, step: int, replace_not_finite: bool) -> None:
        """Add a micro-batch's share of its step's loss, a scalar; `step` is the number of steps that are done.

        `replace_not_finite`: add, in place of a loss that is NaN or infinite, the mean of those since the last log.
        """
        if replace_not_finite:
            # Both are computed, because asking which one is needed would wait for the device.
            mean = self.since_log / (1 + step - self.logged_step)
            is_finite = loss.abs() < float("inf")  # no comparison holds for NaN
            loss = torch.where(is_finite, loss, mean)
        # A new tensor, because `of_done_steps` may be the old one; in float32, whatever the model computes in.
        self.since_log = (self.since_log + loss).to(torch.float32)

    def end_step(self, learning_rate: float, grad_norm: Tensor | float) -> None:
        """All micro-batches of a step have been added, and the optimizer has used these."""
        self.of_done_steps = self.since_log
        self.learning_rate = learning_rate
        self.grad_norm = grad_norm

    def take_mean(self, accelerator: Accelerator, step: int) -> float:
        """The mean loss of the steps since the last log, over all ranks, which all must call this."""
        loss = accelerator.gather(self.since_log).mean().item()
        num_steps = step - self.logged_step
        self.total += loss
        self.logged_step = step
        # A sum that is not finite stays so, as in `transformers`: without the replacement every later log shows it too.
        self.since_log = self.since_log - self.since_log
        self.of_done_steps = self.since_log
        return loss / num_steps

    def state_dict(self, accelerator: Accelerator) -> dict[str, Any]:
        """The content for a checkpoint, as JSON. All ranks must call this; it waits for the device."""
        own = torch.stack([self.since_log, self.of_done_steps])
        return {
            "of_ranks": accelerator.gather(own).reshape(-1, 2).tolist(),
            "total": self.total,
            "logged_step": self.logged_step,
            "learning_rate": float(self.learning_rate),
            "grad_norm": float(self.grad_norm),
        }

    def load_state_dict(self, saved: dict[str, Any], accelerator: Accelerator, keeps_gradients: bool) -> None:
        """Go on from what `state_dict` returned, with the losses of gradients that are kept, or without them."""
        self.total = saved["total"]
        self.logged_step = saved["logged_step"]
        self.learning_rate = saved["learning_rate"]
        self.grad_norm = saved["grad_norm"]
        of_ranks = torch.tensor(saved["of_ranks"], device=self.since_log.device)
        own = of_ranks.mean(0)  # for a rank of another number of ranks
        if len(of_ranks) == accelerator.num_processes:
            own = of_ranks[accelerator.process_index]
        self.of_done_steps = own[1]
        self.since_log = own[0] if keeps_gradients else own[1]


class Progress:
    """How far a training has come. `progress.json` in a checkpoint holds it.

    Attributes:
        epoch: the epoch to go on with, counted from 0.
        batches: how many of its batches are done.
        epoch_ended: True in a checkpoint that was made at an epoch's end, because a resumed run must not call
            `on_epoch_end` for it twice. The next epoch's beginning makes it False.
        saved_steps: the steps of which this run has saved a checkpoint. Others in the folder are another run's.
    """

    def __init__(self, device: torch.device) -> None:
        self.epoch = 0
        self.batches = 0
        self.epoch_ended = False
        self.loss_log = LossLog(device)
        self.saved_steps: list[int] = []

    def state_dict(self, plan: Plan, accelerator: Accelerator, epoch_is_cut_short: bool) -> dict[str, Any]:
        """The content for a checkpoint, as JSON. All ranks must call this; it waits for the device."""
        # Nothing is left to train on in an epoch that a callback cuts short.
        is_done = epoch_is_cut_short and not self.epoch_ended
        batches = plan.batches_per_epoch if is_done else self.batches
        return {
            "position": {"epoch": self.epoch, "batches": batches, "epoch_ended": self.epoch_ended},
            "order": plan.order_settings,
            "loss_log": self.loss_log.state_dict(accelerator),
            "saved_steps": self.saved_steps,
        }

    def load_state_dict(self, saved: dict[str, Any], steps: int, plan: Plan, accelerator: Accelerator) -> None:
        """Go on from what `state_dict` returned after so many steps, where `Plan.goes_on_in_place` says."""
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
