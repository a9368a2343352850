"""The state of a training: how long it is, how far it has come, and the losses that are still to be logged."""

import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from common.accelerator import Accelerator
from common.trainer.arguments import TrainingArguments
from common.trainer.loading import length_of


@dataclass
class Progress:
    """Everything that changes while a Trainer trains, other than what callbacks see in TrainerState.

    Each `Trainer.train` begins a new one. A step is an optimizer step; a batch is a micro-batch of one rank. A
    checkpoint holds the fields from `epoch` to `saved_steps` and those that say what `batches` counts.

    Attributes:
        num_epochs: epochs that are begun; the last one may end early.
        max_steps: steps of the whole training.
        steps_per_epoch: steps of a whole epoch.
        batches_per_epoch: batches of a whole epoch.
        accumulation: batches of a step, but for the last step of an epoch, which may have fewer.
        samples_per_batch: samples in a batch of every rank, all ranks together.
        num_samples: samples in the whole training, of all ranks, for the speed that is logged.
        epoch: the epoch to go on with, counted from 0.
        batches: how many batches of it are done.
        epoch_ended: whether what follows an epoch has begun.
        epoch_stopped: whether the run that is resumed had been told by a callback to end the epoch early.
        carried_batches: how many batches at the end of the epoch before were too few for a step. Their gradients become
            a part of the next step.
        total_loss: the sum of the steps' losses that have been logged.
        loss_since_log: the sum of this rank's losses since then. Every batch brings its share of its step's loss, so
            the sum over a step is the step's loss. It is a float32 tensor on the device, as in `transformers`.
        loss_of_whole_steps: the same without the batches of a step that is not complete.
        logged_step: the step at which losses were last logged.
        learning_rate, grad_norm: of the last step, for a log that comes before the next step. The norm is a tensor
            until it is read from the device.
        saved_steps: the steps of which this run has saved a checkpoint. Others in the folder are another run's.
        start_time, first_step: when and where this call of `train` began.
        ignore_keys: what the evaluations of this call leave out of a model's output.
        trial: what this call of `train` was given for a `model_init`.
        stream_ended: whether the epoch's batches came to their end before as many were read as had been planned.
        batches_to_skip: batches of the epoch that are passed over because a checkpoint's run has trained on them.
        random_states_after_skip: the random states to go on with when they have been passed over.
    """

    # The length of the training.
    num_epochs: int = 0
    max_steps: int = 0
    steps_per_epoch: int = 0
    batches_per_epoch: int = 0
    accumulation: int = 1
    samples_per_batch: int = 0
    num_samples: float = 0

    # The position in it.
    epoch: int = 0
    batches: int = 0
    epoch_ended: bool = False
    epoch_stopped: bool = False
    carried_batches: int = 0

    # What is logged of it, and saved.
    total_loss: float = 0.0
    loss_since_log: Tensor = field(default_factory=lambda: torch.tensor(0.0))
    loss_of_whole_steps: Tensor = field(default_factory=lambda: torch.tensor(0.0))
    logged_step: int = 0
    learning_rate: float | None = None
    grad_norm: Tensor | float | None = None
    saved_steps: list[int] = field(default_factory=list)

    # This call of `train`.
    start_time: float = field(default_factory=time.time)
    first_step: int = 0
    ignore_keys: list[str] | None = None
    trial: Any = None
    stream_ended: bool = False
    batches_to_skip: int = 0
    random_states_after_skip: dict[str, Any] | None = None

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch, or go on with the one that a checkpoint stopped in."""
        if self.batches == 0:
            self.learning_rate = None
            self.grad_norm = None
        self.epoch = epoch
        self.epoch_ended = False
        self.stream_ended = False

    def move_to_next_epoch(self) -> None:
        """Leave the epoch. Batches that were too few for a step are carried into the next one."""
        self.carried_batches = self.batches_of_open_step
        self.epoch += 1
        self.batches = 0
        self.batches_to_skip = 0

    def window_sizes(self) -> Iterator[int]:
        """The number of batches of each step that is left of the epoch."""
        for done in range(self.batches, self.batches_per_epoch, self.accumulation):
            yield min(self.accumulation, self.batches_per_epoch - done)

    @property
    def batches_of_open_step(self) -> int:
        """The batches that are done of the last step, if it is not complete; 0 if it is."""
        if self.batches == self.batches_per_epoch:
            return 0
        return self.batches % self.accumulation

    @property
    def is_within_step(self) -> bool:
        """True if more batches belong to the last step."""
        return self.batches_of_open_step != 0

    def add_loss(self, loss: Tensor, step: int, replace_not_finite: bool) -> None:
        """Add a batch's share of its step's loss, a scalar; `step` is the number of steps that are done.

        Args:
            replace_not_finite: add, in place of a loss that is NaN or infinite, the mean of those since the last log.
        """
        if replace_not_finite:
            # Both are computed, because asking which one is needed would wait for the device.
            mean = self.loss_since_log / (1 + step - self.logged_step)
            is_finite = loss.abs() < float("inf")  # no comparison holds for NaN
            loss = torch.where(is_finite, loss, mean)
        # This makes a new tensor, because `loss_of_whole_steps` may be the old one. It is a float32 one, whatever the
        # model computes in.
        self.loss_since_log = (self.loss_since_log + loss).to(self.loss_since_log.dtype)

    def take_mean_loss(self, accelerator: Accelerator, step: int) -> float:
        """The mean loss of the steps since the last log, over all ranks. All ranks must call this.

        It waits for the device.
        """
        loss = accelerator.gather(self.loss_since_log).mean().item()
        num_steps = step - self.logged_step
        self.total_loss += loss
        self.logged_step = step
        # A sum that is not finite stays so, as in `transformers`: without the replacement every later log shows it too.
        self.loss_since_log = self.loss_since_log - self.loss_since_log
        self.loss_of_whole_steps = self.loss_since_log
        return loss / num_steps

    # Checkpoints.

    def state_dict(self, accelerator: Accelerator, is_cut_short: bool) -> dict[str, Any]:
        """The fields that a resumed run needs, as JSON. All ranks must call this; it waits for the device.

        Args:
            is_cut_short: whether a callback has ended the epoch early.
        """
        saved = {name: getattr(self, name) for name in (*_COUNTED_IN, *_SAVED)}
        # The batches of a step that is not complete will be trained on again.
        own_loss = self.loss_of_whole_steps if self.is_within_step else self.loss_since_log
        saved["loss_since_log"] = accelerator.gather(own_loss).reshape(-1).tolist()
        for name in ("learning_rate", "grad_norm"):
            if saved[name] is not None:
                saved[name] = float(saved[name])
        # Only a resumed run needs to read this. The present one would apply it to the next epoch.
        saved["epoch_stopped"] = is_cut_short
        return saved

    def load_state_dict(self, saved: dict[str, Any], accelerator: Accelerator) -> None:
        """Go on where the run stood that saved this. What `batches` counts stays as it is in this run."""
        for name in _SAVED:
            setattr(self, name, saved[name])
        losses = saved["loss_since_log"]
        if len(losses) == accelerator.num_processes:
            own_loss = losses[accelerator.process_index]
        else:
            own_loss = sum(losses) / len(losses)
        self.loss_since_log = torch.full_like(self.loss_since_log, own_loss)
        self.loss_of_whole_steps = self.loss_since_log

    def counts_like(self, saved: dict[str, Any]) -> bool:
        """True if `batches` means the same samples here as in a run that saved this."""
        return all(getattr(self, name) == saved[name] for name in _COUNTED_IN)

    def go_back_to_whole_step(self) -> None:
        """Take back the batches of a step that is not complete.

        Their gradients have been added to those that were carried, so the latter are lost with them.
        """
        if self.is_within_step:
            self.batches -= self.batches_of_open_step
            self.carried_batches = 0

    def recount(self, steps_done: int) -> None:
        """Find the position after so many steps of another size than those that were done.

        As in `transformers`, all epochs are taken for whole ones, also where a callback had cut one short.
        """
        self.carried_batches = 0
        self.epoch = steps_done // self.steps_per_epoch
        self.batches = steps_done % self.steps_per_epoch * self.accumulation


_COUNTED_IN = ("batches_per_epoch", "samples_per_batch", "accumulation")
_SAVED = (
    "epoch",
    "batches",
    "epoch_ended",
    "epoch_stopped",
    "carried_batches",
    "total_loss",
    "logged_step",
    "learning_rate",
    "grad_norm",
    "saved_steps",
)


def plan(args: TrainingArguments, loader: Any, samples_per_batch: int, accelerator: Accelerator) -> Progress:
    """The beginning of a training on this rank's `loader`, as long as `transformers` would make it.

    Raises:
        ValueError: for a loader without a batch or without a length, if `args.max_steps` is not set.
    """
    accumulation = args.gradient_accumulation_steps
    batches_per_epoch = length_of(loader)
    samples_per_step = args.per_device_train_batch_size * accumulation * accelerator.num_processes
    progress = Progress(
        accumulation=accumulation,
        samples_per_batch=samples_per_batch,
        loss_since_log=torch.tensor(0.0, device=accelerator.device),
        loss_of_whole_steps=torch.tensor(0.0, device=accelerator.device),
    )
    if not batches_per_epoch:
        if args.max_steps <= 0:
            raise ValueError(
                "the training set has no batch or no length, so the number of steps is not known: set max_steps"
            )
        progress.num_epochs = sys.maxsize
        progress.max_steps = args.max_steps
        progress.steps_per_epoch = args.max_steps
        progress.batches_per_epoch = args.max_steps * accumulation if batches_per_epoch is None else 0
        progress.num_samples = samples_per_step * args.max_steps
        return progress
    progress.batches_per_epoch = batches_per_epoch
    progress.steps_per_epoch = math.ceil(batches_per_epoch / accumulation)
    if args.max_steps > 0:
        progress.max_steps = args.max_steps
        progress.num_epochs = math.ceil(args.max_steps / progress.steps_per_epoch)
        progress.num_samples = float(args.max_steps * samples_per_step)
    else:
        num_examples = (
            length_of(getattr(loader, "dataset", None)) or batches_per_epoch * args.per_device_train_batch_size
        )
        progress.max_steps = math.ceil(args.num_train_epochs * progress.steps_per_epoch)
        progress.num_epochs = math.ceil(args.num_train_epochs)
        progress.num_samples = num_examples * args.num_train_epochs
    return progress
