"""An optimizer that steps only where an accumulation window ends, and knows when fp16 made it skip."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .loss_scaler import LossScaler, has_gradients
from .state import GradientState
from .utils import fsdp_utils
from .utils.weights import is_dtensor


class AcceleratedOptimizer(torch.optim.Optimizer):
    """`optimizer`, whose `step` and `zero_grad` do nothing in the micro-batches before the last of a window.

    The base class is there for `isinstance`.

    Args:
        optimizer: the one that the script made.
        device_placement: move its state to where its parameters are.
        scaler: the LossScaler of an fp16 run, else None. It skips the step where a gradient is not finite.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, device_placement: bool = True, scaler: LossScaler | None = None
    ) -> None:
        self.optimizer = optimizer
        self.scaler = scaler
        self.gradient_state = GradientState()
        # The scaler's answer to its last step is a scalar that is not 0 if the step was skipped.
        self._found_inf: torch.Tensor | None = None
        self._takes_set_to_none = "set_to_none" in inspect.signature(optimizer.zero_grad).parameters
        if device_placement:
            # `load_state_dict` copies each state to the device of its parameter.
            state_dict = optimizer.state_dict()
            optimizer.load_state_dict(state_dict)

    def step(self, closure: Callable | None = None) -> None:  # type: ignore[override]  # no loss, as in the original
        """Update the parameters, if this micro-batch ends its window."""
        if not self.gradient_state.sync_gradients:
            return
        if self.scaler is None:
            self.optimizer.step(closure)
        elif has_gradients(self.optimizer):
            self.scaler.step(self.optimizer, closure)
            self._found_inf = self.scaler.found_inf_of(self.optimizer)
        else:
            self._found_inf = None  # Without gradients there was no step to skip.

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients, if this micro-batch ends its window.

        Raises:
            ValueError: for `set_to_none` where the wrapped optimizer does not know it.
        """
        if not self.gradient_state.sync_gradients:
            return
        if self._takes_set_to_none:
            self.optimizer.zero_grad(set_to_none=True if set_to_none is None else set_to_none)
        elif set_to_none is None:
            self.optimizer.zero_grad()
        else:
            raise ValueError("`set_to_none` for Optimizer.zero_grad` is not supported by this optimizer.")
        if self.scaler is not None:
            self.scaler.note_gradients_dropped(self.optimizer)

    @property
    def step_was_skipped(self) -> bool:
        """True if a gradient that is not finite made the last step leave the weights alone.

        The kernel of a fused optimizer decides this on the device. The first read waits for it, and caches the answer.
        """
        if self._found_inf is None:
            return False
        self._found_inf = self._found_inf.cpu()
        return bool(self._found_inf)

    def unscale(self) -> None:
        """Divide the gradients by the scale of the loss: once before a step, however often this is called."""
        scaler = self.scaler
        if scaler is not None and not scaler.has_unscaled(self.optimizer) and has_gradients(self.optimizer):
            scaler.unscale_(self.optimizer)

    def parameters(self) -> Iterator[torch.Tensor]:
        for group in self.param_groups:
            yield from group["params"]

    def train(self) -> None:
        """Enter the training mode of an optimizer that has one, as the schedule-free ones have."""
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()

    def eval(self) -> None:
        """Enter the evaluation mode of an optimizer that has one, as the schedule-free ones have."""
        if hasattr(self.optimizer, "eval"):
            self.optimizer.eval()

    # These attributes and methods of torch's class are those of the wrapped optimizer.

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = param_groups

    @property
    def defaults(self) -> dict[str, Any]:
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def state_dict(self, is_needed: bool = True) -> dict[str, Any]:
        """The wrapped optimizer's state dict. Under FSDP a collective, with whole tensors on the ranks that need it."""
        if self._is_sharded():
            return fsdp_utils.whole_optimizer_state(self.optimizer, is_needed)
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._is_sharded():
            fsdp_utils.load_whole_optimizer_state(self.optimizer, state_dict)
        else:
            self.optimizer.load_state_dict(state_dict)

    def _is_sharded(self) -> bool:
        return any(is_dtensor(parameter) for parameter in self.parameters())

    # torch's class would pickle nothing but its own fields.

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
