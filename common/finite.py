"""A loss that is not finite ends the run, and is noticed without making the CPU wait for the GPU at every step."""

import math

import torch
from torch import Tensor

from common.errors import fail


class Later:
    """A small tensor on its way to the CPU: read it some steps later, and nobody has waited for it."""

    def __init__(self, tensor: Tensor) -> None:
        on_gpu = tensor.device.type == "cuda"
        # Into pinned memory, or the copy would wait for all that the GPU still has to compute.
        self._copy = torch.empty_like(tensor, device="cpu", pin_memory=on_gpu).copy_(tensor, non_blocking=on_gpu)
        self._arrival = torch.cuda.current_stream(tensor.device).record_event() if on_gpu else None

    def tolist(self) -> list:
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._copy.tolist()


def demand_finite_weights(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Raise UserError if what `optimizer` updates is lost. It waits for the device; every rank finds the same.

    A gradient can be lost though its loss was finite: a checkpoint of this step would be of no use.
    """
    weights = (weight for group in optimizer.param_groups for weight in group["params"])
    if not all(weight.isfinite().all() for weight in weights):
        fail(f"the weights are not finite after step {step}, though the loss was: no checkpoint is made of them")


class LossWatch:
    """Raises UserError for the first loss that is not finite: "loss is not finite (nan) at step N on rank R".

    On CPU in that very step. Elsewhere the losses of EVERY calls are kept on the device and copied together, and looked
    at when the next lot is copied; `settle`, which waits, looks at what has come since.
    """

    EVERY = 10

    def __init__(self, device: torch.device, rank: int) -> None:
        self.rank, self.waits = rank, device.type == "cpu"
        self._losses = torch.zeros(self.EVERY, device=device)
        self._steps: list[int] = []
        self._underway: tuple[Later, list[int]] | None = None

    def note(self, loss: Tensor, step: int) -> None:
        """`loss`, a scalar on its device, is that of optimizer step `step`, counted from 1."""
        if self.waits:
            self._demand_finite(loss.item(), step)
            return
        self._losses[len(self._steps)].copy_(loss.detach())
        self._steps.append(step)
        if len(self._steps) == self.EVERY:
            self._look_and_send()

    def settle(self) -> None:
        """Look at all losses noted so far. Before a checkpoint: it must not be of a run that is lost."""
        self._look_and_send()
        self._look_and_send()

    def _look_and_send(self) -> None:
        losses, steps = self._underway or (None, [])
        self._underway, self._steps = (Later(self._losses), self._steps) if self._steps else None, []
        for loss, step in zip(losses.tolist() if losses else [], steps, strict=False):
            self._demand_finite(loss, step)

    def _demand_finite(self, loss: float, step: int) -> None:
        if not math.isfinite(loss):
            fail(f"loss is not finite ({loss}) at step {step} on rank {self.rank}")
