"""The losses of a training between two logs."""

from typing import Any

import torch
from torch import Tensor

from common.accelerator import Accelerator


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
