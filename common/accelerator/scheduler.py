"""A learning-rate scheduler that keeps pace with the optimizer."""

import inspect
from typing import Any

from .state import GradientState, PartialState


class AcceleratedScheduler:
    """`scheduler`, stepped where the optimizer steps, and as often as the data advance.

    A call of `step` counts only where an accumulation window ends and no optimizer skipped its step. It then steps
    `num_processes` times, because the schedule was written for the script's batches and that many of them went by;
    once with `split_batches`, where the script's batch is the global one. Without `step_with_optimizer` every call is
    one step. A scheduler driven by a metric, such as ReduceLROnPlateau, always steps once per call.

    Args:
        scheduler: the one that the script made.
        optimizers: the prepared optimizers whose steps it follows.
    """

    def __init__(self, scheduler, optimizers, step_with_optimizer: bool = True, split_batches: bool = False) -> None:
        self.scheduler = scheduler
        self.optimizers = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
        self.split_batches, self.step_with_optimizer = split_batches, step_with_optimizer
        self.gradient_state = GradientState()
        self.follows_metric = "metrics" in inspect.signature(scheduler.step).parameters

    def step(self, *args, **kwargs) -> None:
        if not self.step_with_optimizer or self.follows_metric:
            self.scheduler.step(*args, **kwargs)
            return
        if not self.gradient_state.sync_gradients and not self.gradient_state.adjust_scheduler:
            return
        if any(optimizer.step_was_skipped for optimizer in self.optimizers):
            return
        for _ in range(1 if self.split_batches else PartialState().num_processes):
            # OneCycleLR raises beyond its total, which padded batches can exceed.
            if self.scheduler._step_count <= getattr(self.scheduler, "total_steps", float("inf")):
                self.scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)
