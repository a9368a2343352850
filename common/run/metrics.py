"""Measurements of a run: steps and seconds, memory, the mean of an epoch's losses; and an end where one is NaN.

Nothing here makes the CPU wait for the GPU at every step.
"""

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.errors import fail
from common.process_group import is_distributed


class Meter:
    """Steps, training time without evaluation, and steady-state throughput.

    The steady state begins after `warm_up_steps` steps of this process; fewer steps are measured as a whole. The device
    is synchronised before a clock is read: at the warm-up's end, twice an epoch, and at each checkpoint.
    """

    def __init__(self, device: torch.device, images_per_step: int, warm_up_steps: int) -> None:
        self.device = device
        self.images_per_step = images_per_step
        self.warm_up_steps = warm_up_steps
        self.steps = 0
        self._resumed_steps = 0
        self._resumed_seconds = 0.0
        self._own_seconds = 0.0
        self._steady_seconds = 0.0
        self._began: float | None = None
        self._steady_began: float | None = None

    def resume(self, steps: int, seconds: float) -> None:
        """Go on from what another process has counted."""
        self.steps = steps
        self._resumed_steps = steps
        self._resumed_seconds = seconds

    def start(self) -> None:
        """An epoch's training begins."""
        self._began = self._now()
        if self._own_steps >= self.warm_up_steps:
            self._steady_began = self._began

    def step(self) -> None:
        """One optimizer step has been taken."""
        self.steps += 1
        if self._own_steps == self.warm_up_steps:
            self._steady_began = self._now()

    def stop(self) -> None:
        """The epoch's training has ended; what follows, such as evaluation, is not counted."""
        now = self._now()
        if self._began is not None:
            self._own_seconds += now - self._began
        if self._steady_began is not None:
            self._steady_seconds += now - self._steady_began
        self._began = None
        self._steady_began = None

    @property
    def seconds(self) -> float:
        """Training time so far, that before a resumption included."""
        seconds = self._resumed_seconds + self._own_seconds
        if self._began is not None:
            seconds += self._now() - self._began
        return seconds

    @property
    def images_per_sec(self) -> float:
        """Global samples per second in the steady state; 0 where this process has trained on nothing."""
        steps = self._own_steps - self.warm_up_steps
        seconds = self._steady_seconds
        if steps <= 0:
            steps = self._own_steps
            seconds = self._own_seconds
        return steps * self.images_per_step / seconds if seconds else 0.0

    @property
    def _own_steps(self) -> int:
        return self.steps - self._resumed_steps

    def _now(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()


def reset_peak_memory(devices: Sequence[torch.device]) -> None:
    """Let the allocator of each GPU measure its peak anew."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)


def peak_memory_bytes(devices: Sequence[torch.device]) -> list[int]:
    """The peak of each device's own allocator; nothing for a CPU, which keeps none."""
    return [torch.cuda.max_memory_allocated(device) for device in devices if device.type == "cuda"]


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
