"""One training step of somebody else's network, and one clear line for whatever fails in it."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_map_only

from benchmarks.harness.hollow import REFUSED, DependsOnNumbers, hollow_if_possible
from benchmarks.your_network.errors import StepFailed
from benchmarks.your_network.spec import UserNetwork, call
from common.errors import UserError

# What is in the message of torch, and the reason that is given in its place.
REASONS = {
    REFUSED: "a tensor is larger than this machine's address space",
    "Storage size calculation overflowed": "a tensor is larger than this machine's address space",
    "SparseTensorImpl": (
        "a gradient is sparse: its bytes depend on the numbers, for it has a row for each index. Ask with "
        "sparse=False, and Adam in place of SparseAdam"
    ),
}


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """StepFailed, which says what failed in one line, in place of an exception of somebody's network."""
    try:
        yield
    except (UserError, DependsOnNumbers, StepFailed):
        raise
    except Exception as error:
        message = str(error).strip().partition("\n")[0]
        reason = f"{type(error).__name__}: {message}"
        for known, better in REASONS.items():
            if known in str(error):
                reason = better
        raise StepFailed(f"{what}: {reason}") from error


def build(network: UserNetwork, device: str | torch.device = "cpu") -> nn.Module:
    """The module, in training mode.

    Raises:
        StepFailed: if it cannot be built, or has no parameter to train.
    """
    with explained(f"{network.title} cannot be built"):
        model = network.build()
        if not isinstance(model, nn.Module):
            raise TypeError(f"it returns a {type(model).__name__}, not a module")
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError("it has no parameter to train")
        return model.train().to(device)


def make_batch(network: UserNetwork, size: int, device: str | torch.device = "cpu") -> tuple[Any, Any]:
    """The inputs and targets of `size` samples, on the device.

    Raises:
        StepFailed: if they cannot be made, or are not of so many samples.
    """
    assumed = f" ({network.assumed})" if network.assumed else ""
    with explained(f"a batch of {size} cannot be made{assumed}"):
        made = network.batch(size)
        if not isinstance(made, tuple | list) or len(made) != 2:
            raise TypeError(f"batch({size}) must return two things, inputs and targets, not {_short(made)}")
        inputs, targets = made
        shapes = _shapes(inputs)
        if not shapes:
            raise TypeError(f"the inputs of batch({size}) must be tensors")
        for position, shape in enumerate(shapes):
            if shape and shape[0] % size and position not in network.shared:
                raise ValueError(
                    f"batch({size}) made an input of shape {tuple(shape)}, whose first dimension should be the sample"
                )
        return tree_map_only(Tensor, lambda tensor: tensor.to(device), (inputs, targets))


def _short(made: Any) -> str:
    return str(len(made)) if isinstance(made, tuple | list) else f"a {type(made).__name__}"


def _shapes(inputs: Any) -> list[torch.Size]:
    return [leaf.shape for leaf in tree_iter(inputs) if isinstance(leaf, Tensor)]


def with_shared_inputs(network: UserNetwork) -> UserNetwork:
    """The network, which knows those inputs that keep their shape where others grow with the samples.

    Raises:
        StepFailed: where the first dimension of another input does not grow with the samples. It may be a multiple of
            their number, as where the words of all texts lie one behind the other.
    """
    if not network.has_own_batch:
        return network
    everything = replace(network, shared=frozenset(range(1000)))  # not checked yet

    def shapes() -> list[list[torch.Size]]:
        return [_shapes(make_batch(everything, size)[0]) for size in (2, 4)]  # samples may come in pairs

    of_two, of_four = hollow_if_possible(shapes)
    shared = [position for position, pair in enumerate(zip(of_two, of_four, strict=False)) if pair[0] == pair[1]]
    if len(shared) < len(of_two):
        network = replace(network, shared=frozenset(shared))
    for position, (two, four) in enumerate(zip(of_two, of_four, strict=False)):
        if position not in network.shared and two and (two[0] % 2 or four[0] != 2 * two[0]):
            raise StepFailed(
                f"{network.title} cannot be asked about: batch(2) made an input of shape {tuple(two)} and batch(4) one "
                f"of shape {tuple(four)}; the first dimension should be the sample"
            )
    return network


def loss_of(network: UserNetwork, model: nn.Module, batch: tuple[Any, Any], dtype: torch.dtype | None = None) -> Tensor:
    """The loss of a batch, computed in mixed precision if there is a `dtype`.

    Raises:
        StepFailed: if the forward or the loss fails, or the loss is no scalar that depends on the parameters.
    """
    inputs, targets = batch
    device = next(model.parameters()).device
    with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
        with explained(f"the forward of {network.title} failed"):
            outputs = call(model, inputs)
        with explained(f"the loss of {network.title} failed"):
            loss = network.loss(outputs, targets)
            if not isinstance(loss, Tensor):
                raise TypeError(f"the loss must be a scalar tensor, not a {type(loss).__name__}")
            if loss.dim() != 0:
                raise TypeError(f"the loss must be a scalar tensor, not a tensor of shape {tuple(loss.shape)}")
            if not loss.requires_grad:
                raise ValueError("it depends on no parameter that is trained")
    return loss


def backward(network: UserNetwork, loss: Tensor) -> None:
    """The gradients. StepFailed is raised if they cannot be computed."""
    with explained(f"the backward of {network.title} failed"):
        loss.backward()


def update(network: UserNetwork, optimizer: torch.optim.Optimizer) -> None:
    """The optimizer's step. StepFailed is raised if it fails."""
    with explained(f"the optimizer of {network.title} failed"):
        optimizer.step()


def make_optimizer(network: UserNetwork, model: nn.Module) -> torch.optim.Optimizer:
    """The network's optimizer, which takes all parameters at once, as torch's do on a GPU unless they are told.

    Raises:
        StepFailed: if it cannot be made.
    """
    with explained(f"the optimizer of {network.title} cannot be made"):
        optimizer = network.optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer(parameters) must return one optimizer of torch, not a {type(optimizer).__name__}"
            )
    return for_all_at_once(optimizer)


def for_all_at_once(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The same optimizer, which takes all parameters at once."""
    for group in optimizer.param_groups:
        if group.get("foreach", True) is None and not group.get("fused"):
            group["foreach"] = True
    return optimizer
