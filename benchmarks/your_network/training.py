"""One training step of somebody else's network, and one clear line for whatever fails in it."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_map_only

from benchmarks.your_network.errors import StepFailed, described
from benchmarks.your_network.spec import UserNetwork, call

SMALLEST = 2  # samples of a batch: a batch normalisation needs more than one


@contextlib.contextmanager
def step_failure(what: str) -> Iterator[None]:
    """StepFailed, which says what failed in one line, in place of an exception of somebody's network."""
    try:
        yield
    except StepFailed:  # what failed is said already
        raise
    except Exception as error:
        raise StepFailed(f"{what}: {described(error)}") from error


def build(network: UserNetwork) -> nn.Module:
    """The module, in training mode.

    Raises:
        StepFailed: if it cannot be built, or has no parameter to train.
    """
    with step_failure(f"{network.title} cannot be built"):
        model = network.build()
        if not isinstance(model, nn.Module):
            raise TypeError(f"it returns a {type(model).__name__}, not a module")
        if not trainable(model):
            raise ValueError("it has no parameter to train")
        return model.train().to("cpu")  # the accounting of memory takes what is moved to be on the device


def make_batch(network: UserNetwork, size: int) -> tuple[Any, Any]:
    """The inputs and targets of `size` samples.

    Raises:
        StepFailed: if they cannot be made, or are not of so many samples.
    """
    with step_failure(f"a batch of {size} cannot be made"):
        inputs, targets = network.batch(size)
        shapes = [leaf.shape for leaf in tree_iter(inputs) if isinstance(leaf, Tensor)]
        for shape in shapes:
            # It may be a multiple, as where the words of all texts lie one behind the other.
            if shape and shape[0] % size:
                reason = "should be the sample; what all samples share can be a buffer of the module"
                raise ValueError(f"the first dimension of an input of shape {tuple(shape)} {reason}")
        return tree_map_only(Tensor, lambda tensor: tensor.to("cpu"), (inputs, targets))


def loss_of(network: UserNetwork, model: nn.Module, batch: tuple[Any, Any], dtype: torch.dtype | None = None) -> Tensor:
    """The loss of a batch, computed in mixed precision if there is a `dtype`.

    Raises:
        StepFailed: if the forward or the loss fails, or the loss is no scalar.
    """
    inputs, targets = batch
    device = next(model.parameters()).device
    with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
        with step_failure(f"the forward of {network.title} failed"):
            outputs = call(model, inputs)
        with step_failure(f"the loss of {network.title} failed"):
            loss = network.loss(outputs, targets)
            if not isinstance(loss, Tensor) or loss.dim() != 0:
                raise TypeError(f"it must be a scalar tensor, not {getattr(loss, 'shape', loss)}")
    return loss


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def make_optimizer(network: UserNetwork, parameters: list[Tensor]) -> torch.optim.Optimizer:
    """The network's optimizer, which takes all parameters at once, as torch's do on a GPU unless they are told.

    Raises:
        StepFailed: if it cannot be made.
    """
    with step_failure(f"the optimizer of {network.title} cannot be made"):
        return use_foreach(network.optimizer(parameters))


def use_foreach(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The same optimizer, which takes all parameters at once."""
    for group in optimizer.param_groups:
        if group.get("foreach", True) is None and not group.get("fused"):
            group["foreach"] = True
    return optimizer
