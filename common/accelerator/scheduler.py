"""A learning-rate scheduler that keeps pace with the optimizer."""

from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from .state import GradientState, PartialState


class AcceleratedScheduler:
    """`scheduler`, stepped where the optimizer steps, and as often as the data advance.

    A call of `step` counts only where an accumulation window ends and no optimizer skipped its step. The script plans
    its schedule for one process. N processes finish an epoch in an N-th of the steps, so each step counts N times. With
    `split_batches` it counts once, because the script's batch is the global one. Without
    `step_with_optimizer` every call is one step: for schedules that follow epochs, or a metric as ReduceLROnPlateau
    does.

    Args:
        scheduler: the one that the script made.
        optimizers: the prepared optimizers whose steps it follows.
        step_with_optimizer: whether to follow them.
        split_batches: see DataLoaderConfiguration.
    """

    def __init__(
        self,
        scheduler: LRScheduler,
        optimizers: torch.optim.Optimizer | list[torch.optim.Optimizer],
        step_with_optimizer: bool = True,
        split_batches: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers: Any = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
        self.split_batches = split_batches
        self.step_with_optimizer = step_with_optimizer
        self.gradient_state = GradientState()
        self.num_processes = PartialState().num_processes

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the schedule, if the optimizers stepped."""
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if not self.gradient_state.sync_gradients:
            return
        if any(optimizer.step_was_skipped for optimizer in self.optimizers):
            return
        if self.split_batches:
            self.scheduler.step(*args, **kwargs)
            return
        # OneCycleLR raises after its last step. Padded batches can make more steps than the script has planned.
        total_steps = getattr(self.scheduler, "total_steps", None)
        for _ in range(self.num_processes):
            if total_steps is None or self.scheduler._step_count <= total_steps:
                self.scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> list[float | torch.Tensor]:
        """The learning rates of the last step, one for each group of parameters."""
        return self.scheduler.get_last_lr()

    def get_lr(self) -> list[float | torch.Tensor]:
        """The learning rates that the schedule computes now, one for each group of parameters."""
        return self.scheduler.get_lr()

    def state_dict(self) -> dict[str, Any]:
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state_dict)
