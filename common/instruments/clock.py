"""A clock that starts, counts and stops by torch's hooks for forwards and optimizer steps."""

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from tqdm import tqdm


@dataclass
class Clock:
    """Steps and seconds of the training in the block `with clock:`, without its evaluations.

    torch calls a hook                          the clock
    ------------------------------------------  ------------------------------------------------------------------
    before a forward of the training            starts, if it does not run, and counts a micro-batch
    before the first forward after the warm-up  stops and starts again: the seconds so far are the warm-up's
    after an epoch's last optimizer step        stops: neither the checkpoint nor the evaluation that follows counts
    before a forward of an evaluation           stops, if it still runs

    It still runs at an evaluation if fp16 has skipped the last optimizer step, or if an earlier run has done a part of
    the epoch: then fewer micro-batches are counted than an epoch has. Skipped steps count too, so steps are counted by
    forwards. The clock waits for the device when it starts and when it stops, and at no other step.

    Args:
        model: the module that is called once for each micro-batch of this process.
        device: the model's device.
        steps_per_epoch: the number of optimizer steps in an epoch.
        accumulation: the number of micro-batches in an optimizer step.
        warm_up_steps: the number of optimizer steps that `steps_per_second` leaves out.
        bar: a progress bar, which moves by one before the last forward of each optimizer step.

    Attributes:
        seconds: the seconds of training until the clock last stopped.
        warm_up_seconds: the seconds of the warm-up, or 0.0 if it has not ended.
    """

    model: nn.Module
    device: torch.device
    steps_per_epoch: int
    accumulation: int
    warm_up_steps: int
    bar: tqdm
    seconds: float = field(default=0.0, init=False)
    warm_up_seconds: float = field(default=0.0, init=False)
    _micro_batches: int = field(default=0, init=False)
    _micro_batches_of_epoch: int = field(default=0, init=False)
    _started_at: float | None = field(default=None, init=False)
    _hooks: list[Any] = field(default_factory=list, init=False)

    def __enter__(self) -> "Clock":
        self._hooks = [
            self.model.register_forward_pre_hook(self._before_forward),
            register_optimizer_step_post_hook(self._after_optimizer_step),
        ]
        return self

    def __exit__(self, *exception: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def steps(self) -> int:
        return self._micro_batches // self.accumulation

    def steps_per_second(self) -> float:
        """The speed after the warm-up, or from the start if no step follows the warm-up; 0.0 without any step."""
        steps = self.steps - self.warm_up_steps
        seconds = self.seconds - self.warm_up_seconds
        if steps <= 0:
            steps = self.steps
            seconds = self.seconds
        return steps / seconds if seconds else 0.0

    def end_epoch(self) -> None:
        """Stop. The next forward of the training begins an epoch."""
        self._stop()
        self._micro_batches_of_epoch = 0

    def _before_forward(self, model: nn.Module, inputs: Any) -> None:
        if not model.training:  # an evaluation follows each epoch
            self.end_epoch()
            return
        if self._micro_batches == self.warm_up_steps * self.accumulation:
            self._stop()
            self.warm_up_seconds = self.seconds
        if self._started_at is None:
            self._started_at = now(self.device)
        self._micro_batches += 1
        self._micro_batches_of_epoch += 1
        if self._micro_batches % self.accumulation == 0:
            self.bar.update()

    def _after_optimizer_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._micro_batches_of_epoch == self.steps_per_epoch * self.accumulation:
            self._stop()

    def _stop(self) -> None:
        """Add the time since the clock has started to `seconds`; if it does not run, nothing changes."""
        if self._started_at is not None:
            self.seconds += now(self.device) - self._started_at
            self._started_at = None


def now(device: torch.device) -> float:
    """The time in seconds, read when the device has done all its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()
