"""A network of somebody's own, as the parts of its training step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_map_only

from benchmarks.your_network.errors import failing_as
from benchmarks.your_network.units import checkpoint_units

SMALLEST_BATCH = 2  # a batch normalisation needs more than one sample


@dataclass(frozen=True)
class UserNetwork:
    """A network, and the parts of its training step, each of which raises StepFailed if the user's code fails.

    Attributes:
        title: the name in the tables.
        build: makes the module.
        batch: makes the inputs and targets of `n` samples, as `batch(n)`.
        loss: takes outputs and targets, and returns a scalar.
        optimizer: takes the parameters.
        autocast: the dtype of mixed precision, or None.
        checkpointing: each of the `units` keeps its inputs only, and computes again in backward.
    """

    title: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Any, Any]]
    loss: Callable[[Any, Any], Tensor]
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    autocast: torch.dtype | None = None
    checkpointing: bool = False

    def make_model(self) -> nn.Module:
        """The module, on the CPU and in training mode. It has a parameter to train."""
        with failing_as(f"{self.title} cannot be built"):
            model = self.build()
            if not isinstance(model, nn.Module):
                raise TypeError(f"it returns a {type(model).__name__}, not a module")
            if not trainable(model):
                raise ValueError("it has no parameter to train")
            model.train().to("cpu")  # the accounting of memory takes what is moved to be on the device
        return checkpoint_units(model) if self.checkpointing else model

    def make_batch(self, samples: int) -> tuple[Any, Any]:
        """The inputs and targets of so many samples, on the CPU."""
        with failing_as(f"a batch of {samples} cannot be made"):
            batch = self.batch(samples)
            inputs, _ = batch
            for leaf in tree_iter(inputs):
                # It may be a multiple, as where the words of all texts lie one behind the other.
                if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] % samples:
                    reason = "should be the sample; what all samples share can be a buffer of the module"
                    raise ValueError(f"the first dimension of an input of shape {tuple(leaf.shape)} {reason}")
            return tree_map_only(Tensor, lambda tensor: tensor.to("cpu"), batch)

    def compute_loss(self, model: nn.Module, batch: tuple[Any, Any]) -> Tensor:
        """The loss of a batch, a scalar. `model` may be wrapped, and lies where the batch does."""
        inputs, targets = batch
        device = next(model.parameters()).device
        with torch.autocast(device.type, dtype=self.autocast, enabled=self.autocast is not None):
            with failing_as(f"the forward of {self.title} failed"):
                outputs = _call(model, inputs)
            with failing_as(f"the loss of {self.title} failed"):
                loss = self.loss(outputs, targets)
                if not isinstance(loss, Tensor) or loss.dim() != 0:
                    raise TypeError(f"it must be a scalar tensor, not {getattr(loss, 'shape', loss)}")
        return loss

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer for all trainable parameters of `model`, which may be wrapped."""
        with failing_as(f"the optimizer of {self.title} cannot be made"):
            return self.optimizer(trainable(model))

    def take_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Any, Any]) -> None:
        """Train `model`, which may be wrapped, with a batch that lies where it does."""
        loss = self.compute_loss(model, batch)
        with failing_as(f"the backward of {self.title} failed"):
            loss.backward()
        with failing_as(f"the optimizer of {self.title} failed"):
            optimizer.step()
        optimizer.zero_grad()


def _call(model: nn.Module, inputs: Any) -> Any:
    """The outputs of `model`: a tuple are its arguments, a dict its named ones, everything else is the only one."""
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def use_foreach(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer take all parameters at once, as torch's do on a GPU, unless its maker chose otherwise."""
    for group in optimizer.param_groups:
        if group.get("foreach", True) is None and not group.get("fused"):
            group["foreach"] = True
