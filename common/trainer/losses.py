"""The training loss between two logs, added up on the device: no step waits for a number."""

import torch
from torch import Tensor

from common.accelerator import Accelerator


class RunningLoss:
    """The sum of this rank's losses since they were last logged.

    Every micro-batch brings its share of its step's loss, so the sum over a step is the step's loss. The sums are
    float32 tensors, as in `transformers`.

    Args:
        device: where the model computes its losses.
        replace_not_finite: add, in place of a loss that is NaN or infinite, the mean of those since the last log.

    Attributes:
        sum: of all micro-batches since the last log.
        sum_of_whole_steps: the same without the micro-batches of a step that is not complete.
    """

    def __init__(self, device: torch.device, replace_not_finite: bool) -> None:
        self.replace_not_finite = replace_not_finite
        self.sum = torch.tensor(0.0, device=device)
        self.sum_of_whole_steps = self.sum

    def add(self, loss: Tensor, steps_since_log: int) -> None:
        """Add the loss of a micro-batch, a scalar, `steps_since_log` whole steps after the last log."""
        if self.replace_not_finite:
            # Both are computed, because asking which one is needed would wait for the device.
            mean = self.sum / (1 + steps_since_log)
            loss = torch.where(torch.isfinite(loss), loss, mean)
        # This makes a new tensor, because `sum_of_whole_steps` may be the old one. It is a float32 one, whatever the
        # model computes in.
        self.sum = (self.sum + loss).to(self.sum.dtype)

    def end_step(self) -> None:
        """Note that the micro-batches added so far make whole steps."""
        self.sum_of_whole_steps = self.sum

    def take_mean_over_ranks(self, accelerator: Accelerator) -> float:
        """The mean of the ranks' sums, which begin anew. All ranks must call this; it waits for the device."""
        mean = accelerator.gather(self.sum).mean().item()
        # A sum that is not finite stays so, as in `transformers`: without the replacement every later log shows it too.
        self.sum = self.sum - self.sum
        self.sum_of_whole_steps = self.sum
        return mean

    def of_all_ranks(self, accelerator: Accelerator, whole_steps_only: bool) -> list[float]:
        """The sums of the ranks, in their order. All ranks must call this; it waits for the device."""
        own = self.sum_of_whole_steps if whole_steps_only else self.sum
        return accelerator.gather(own).reshape(-1).tolist()

    def restore(self, sums: list[float], rank: int, num_ranks: int) -> None:
        """Take over a sum that `of_all_ranks` gave; on another number of ranks each takes over their mean."""
        if not sums:
            return
        mean = sum(sums) / len(sums)
        own = sums[rank] if len(sums) == num_ranks else mean
        self.sum = torch.full_like(self.sum, own)
        self.sum_of_whole_steps = self.sum
