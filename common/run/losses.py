"""The mean of an epoch's losses, and an early end for a run whose loss or weights are not finite.

Neither makes the CPU wait for the GPU at every step.
"""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.errors import fail
from common.process_group import is_distributed


class EpochLoss:
    """The losses of one epoch's micro-batches on this rank, added up on the device in float64.

    Attributes:
        total: their sum, a scalar on the device.
        micro_batches: how many they are.
    """

    def __init__(self, device: torch.device) -> None:
        self.total = torch.zeros((), dtype=torch.float64, device=device)
        self.micro_batches = 0

    def add(self, loss: Tensor) -> None:
        self.total += loss.detach()
        self.micro_batches += 1

    def mean(self) -> Tensor:
        return self.total / self.micro_batches

    def average_over_ranks(self) -> None:
        """Replace this rank's sum by the mean of the ranks' sums. A collective: all processes must call it.

        The mean over the ranks stays what it was. But now each rank's sum stands for all, as a checkpoint needs it.
        """
        if is_distributed():
            dist.all_reduce(self.total)
            self.total /= dist.get_world_size()

    def reset(self) -> None:
        self.total.zero_()
        self.micro_batches = 0


class DeferredRead:
    """A small tensor on its way to the CPU: whoever reads it some steps later does not wait for the GPU."""

    def __init__(self, tensor: Tensor) -> None:
        on_gpu = tensor.device.type == "cuda"
        # A copy into memory that is not pinned would wait for all that the GPU still has to compute.
        self._copy = torch.empty_like(tensor, device="cpu", pin_memory=on_gpu)
        self._copy.copy_(tensor, non_blocking=on_gpu)
        self._arrival = torch.cuda.current_stream(tensor.device).record_event() if on_gpu else None

    def tolist(self) -> list:
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._copy.tolist()


class _LossesInFlight(NamedTuple):
    """Losses that are being copied to the CPU, and the optimizer steps that they belong to."""

    losses: DeferredRead
    steps: list[int]


class LossWatch:
    """Raises UserError for the first loss that is not finite: "loss is not finite (nan) at step N on rank R".

    On a CPU it looks at each loss at once. On a GPU LOSSES_PER_COPY losses are kept on the device and copied together.
    It looks at them when the next lot is copied, or in `settle`, which waits for the device.
    """

    LOSSES_PER_COPY = 10

    def __init__(self, device: torch.device, rank: int) -> None:
        self.rank = rank
        self.reads_at_once = device.type == "cpu"
        self._recent_losses = torch.zeros(self.LOSSES_PER_COPY, device=device)
        self._recent_steps: list[int] = []
        self._in_flight: _LossesInFlight | None = None

    def note(self, loss: Tensor, step: int) -> None:
        """Note `loss`, a scalar on its device, of optimizer step `step`, counted from 1."""
        if self.reads_at_once:
            self._demand_finite(loss.item(), step)
            return
        self._recent_losses[len(self._recent_steps)].copy_(loss.detach())
        self._recent_steps.append(step)
        if len(self._recent_steps) == self.LOSSES_PER_COPY:
            self._check_arrived()
            self._send_recent()

    def settle(self) -> None:
        """Look at all losses noted so far, which waits for the device."""
        self._check_arrived()
        self._send_recent()
        self._check_arrived()

    def _send_recent(self) -> None:
        if self._recent_steps:
            self._in_flight = _LossesInFlight(DeferredRead(self._recent_losses), self._recent_steps)
            self._recent_steps = []

    def _check_arrived(self) -> None:
        if self._in_flight is None:
            return
        losses = self._in_flight.losses.tolist()
        # The last lot before a checkpoint may be smaller than the buffer.
        for loss, step in zip(losses, self._in_flight.steps, strict=False):
            self._demand_finite(loss, step)
        self._in_flight = None

    def _demand_finite(self, loss: float, step: int) -> None:
        if not math.isfinite(loss):
            fail(f"loss is not finite ({loss}) at step {step} on rank {self.rank}")


def demand_finite_weights(model: nn.Module, step: int) -> None:
    """Raise UserError if a weight of `model` is not finite. Every rank finds the same.

    A gradient can overflow although its loss was finite, and a checkpoint of this step would be of no use. On a GPU
    the CPU waits once, for one answer about all weights.
    """
    per_weight = [weight.isfinite().all() for weight in model.parameters()]
    if not torch.stack(per_weight).all():
        fail(f"the weights are not finite after step {step}, though the loss was: no checkpoint is made of them")
