"""An optimizer that steps only where an accumulation window ends, and knows when fp16 made it skip."""

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import torch

from .state import GradientState


class LossScaler(torch.amp.GradScaler):
    """A GradScaler that adapts its scale when a loss is next scaled: when all optimizers of a window have stepped."""

    outdated = False

    def step(self, optimizer: torch.optim.Optimizer, *args, **kwargs) -> Any:
        self.outdated = True
        return super().step(optimizer, *args, **kwargs)

    def _adapt(self) -> None:
        if self.outdated:
            self.update()
            self.outdated = False

    def scale(self, outputs: torch.Tensor) -> torch.Tensor:
        self._adapt()
        return super().scale(outputs)

    def state_dict(self) -> dict[str, Any]:
        self._adapt()
        return super().state_dict()


def linked(part: str, name: str) -> property:
    """`name` of an object's `part`, to read and to set."""
    return property(attrgetter(f"{part}.{name}"), lambda self, value: setattr(getattr(self, part), name, value))


class AcceleratedOptimizer(torch.optim.Optimizer):
    """`optimizer`, whose `step` and `zero_grad` do nothing in the micro-batches before the last of a window.

    Args:
        optimizer: the one that the script made.
        device_placement: move its state to where its parameters are.
        scaler: of the loss, under fp16. It skips the step where a gradient is not finite.
    """

    def __init__(self, optimizer, device_placement: bool = True, scaler: LossScaler | None = None) -> None:
        # The base class is there for `isinstance`; what it would hold is the wrapped optimizer's.
        self.optimizer, self.scaler = optimizer, scaler
        self.gradient_state = GradientState()
        self.step_was_skipped = self.unscaled = False
        if scaler is not None:
            optimizer.register_step_post_hook(self._note_step)
        if device_placement:
            optimizer.load_state_dict(optimizer.state_dict())

    state, param_groups, defaults = (linked("optimizer", name) for name in ("state", "param_groups", "defaults"))
    state_dict, load_state_dict = linked("optimizer", "state_dict"), linked("optimizer", "load_state_dict")
    add_param_group = linked("optimizer", "add_param_group")

    def _note_step(self, *_) -> None:
        self.step_was_skipped = False

    def step(self, closure=None) -> None:
        """Update the parameters, if this micro-batch ends its window."""
        if not self.gradient_state.sync_gradients:
            return
        if self.scaler is None:
            self.optimizer.step(closure)
        elif self.has_gradients():
            self.step_was_skipped = True
            self.scaler.step(self.optimizer, *([] if closure is None else [closure]))
            self.unscaled = False

    def parameters(self) -> Iterator[torch.Tensor]:
        return (parameter for group in self.param_groups for parameter in group["params"])

    def has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self.parameters())

    def unscale(self) -> None:
        """Divide the scale of the loss out of the gradients: once before a step, however often this is called."""
        if self.scaler is not None and not self.unscaled and self.has_gradients():
            self.scaler.unscale_(self.optimizer)
            self.unscaled = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, if this micro-batch ends its window."""
        if not self.gradient_state.sync_gradients:
            return
        self.optimizer.zero_grad(set_to_none=set_to_none)
        if self.unscaled:  # and never stepped: the scaler must forget it
            self.unscaled, self.scaler.outdated = False, True

    def train(self) -> None:
        """Enter the training mode of an optimizer that has one, as the schedule-free ones have."""
        getattr(self.optimizer, "train", lambda: None)()

    def eval(self) -> None:
        """Enter the evaluation mode of an optimizer that has one, as the schedule-free ones have."""
        getattr(self.optimizer, "eval", lambda: None)()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
