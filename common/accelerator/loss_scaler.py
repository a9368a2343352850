"""The scale of the loss under fp16, which adapts by itself to the optimizer steps that were made."""

import weakref
from itertools import chain
from typing import Any

import torch
from torch.amp.grad_scaler import OptState


class LossScaler(torch.amp.GradScaler):
    """A GradScaler for scripts that never call `update`, and for optimizers that do not all step in each window.

    torch's scaler keeps a stage for the gradients of each optimizer:

        READY       They carry the scale of the loss.
        UNSCALED    `unscale_` has divided them by it, so that they can be clipped. Their step is still to come.
        STEPPED     `step` has used them, or the script has dropped them. They count in the next `update`.

    `update` adapts the scale to what is STEPPED, and makes it READY. This class calls it before the scale is used,
    read, saved or loaded. What is UNSCALED waits: torch's `update` would count it too, and forget that it was divided.
    """

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        super().unscale_(optimizer)
        # A weak reference: a state may stay for long, and would keep the model alive.
        self._per_optimizer_states[id(optimizer)]["optimizer"] = weakref.ref(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step `optimizer`, unless one of its gradients is not finite."""
        if self._stage_of(optimizer) is OptState.STEPPED:
            self.update()  # As in the original, a second step divides the same gradients by the scale again.
        return super().step(optimizer, *args, **kwargs)

    def _maybe_opt_step(self, optimizer: Any, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        # torch's `step` calls this for an optimizer without a fused kernel. As in torch's own method, `item` waits for
        # the device; here the answer is kept, so that `found_inf_of` need not wait again.
        per_device = optimizer_state["found_inf_per_device"].values()
        num_found = sum(found_inf.item() for found_inf in per_device)
        optimizer_state["found_inf"] = torch.tensor(num_found)
        return None if num_found else optimizer.step(*args, **kwargs)

    def found_inf_of(self, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        """A scalar that is not 0 if a gradient was not finite in the step just made, which left the weights alone.

        After the step of a fused optimizer it is on the device, and nobody has waited for it yet.
        """
        state = self._per_optimizer_states[id(optimizer)]
        if "found_inf" in state:
            return state["found_inf"]
        found_infs = list(state["found_inf_per_device"].values())
        on_one_device = [found_inf.to(found_infs[0].device, non_blocking=True) for found_inf in found_infs]
        return sum(on_one_device, torch.zeros(()))

    def has_unscaled(self, optimizer: torch.optim.Optimizer) -> bool:
        """True where the gradients of `optimizer` are without the scale of the loss, and no step has used them yet."""
        return self._stage_of(optimizer) is OptState.UNSCALED

    def _stage_of(self, optimizer: torch.optim.Optimizer) -> OptState | None:
        # Asking by [] would make a state, and a scaler that has any cannot be pickled.
        state = self._per_optimizer_states.get(id(optimizer))
        return None if state is None else state["stage"]

    def note_gradients_dropped(self, optimizer: torch.optim.Optimizer) -> None:
        """Take note that unscaled gradients were set to zero or None. If they were not finite, the scale shrinks."""
        if self.has_unscaled(optimizer):
            self._per_optimizer_states[id(optimizer)]["stage"] = OptState.STEPPED

    def scale(self, outputs: Any) -> Any:
        self.update()
        return super().scale(outputs)

    def get_scale(self) -> float:
        self.update()
        return super().get_scale()

    def state_dict(self) -> dict[str, Any]:
        self.update()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.update()
        super().load_state_dict(state_dict)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adapt the scale to the gradients that are STEPPED, if there are any. A script may call this too."""
        states = self._per_optimizer_states
        waiting = {}
        for key, state in list(states.items()):
            if state["stage"] is OptState.UNSCALED:
                optimizer = state["optimizer"]()
                # Without gradients, `model.zero_grad()` has dropped them, and so they count as STEPPED.
                if optimizer is not None and has_gradients(optimizer):
                    waiting[key] = states.pop(key)
        if new_scale is not None or any(state["found_inf_per_device"] for state in states.values()):
            super().update(new_scale)
        self._per_optimizer_states.update(waiting)  # torch's `update` begins with new states


def has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return any(parameter.grad is not None for parameter in parameters)
