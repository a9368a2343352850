"""One training step of somebody else's network, and one clear line for whatever fails in it."""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_map_only

from benchmarks.harness.hollow import REFUSED, DependsOnNumbers, hollow_if_possible
from benchmarks.your_network.spec import UserNetwork, call
from common.errors import UserError

MUST_RETURN = "batch({}) must return two things, inputs and targets"
OVERFLOWED = "Storage size calculation overflowed"  # is in what torch raises for a tensor of 2**63 bytes or more
SPARSE_TENSOR = "SparseTensorImpl"  # is in what torch raises where a sparse tensor is asked for its storage
SPARSE = (
    "is sparse: its bytes depend on the numbers, for it has a row for each index. Ask with sparse=False, and Adam in "
    "place of SparseAdam"
)


class StepFailed(Exception):
    """A step of somebody's network that failed, in one line.

    Attributes:
        what: what failed.
        reason: why.
    """

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(f"{what}: {reason}")
        self.what = what
        self.reason = reason


class TooLarge(StepFailed):
    """The system does not even give address space for a tensor."""

    def __init__(self, what: str) -> None:
        super().__init__(what, "a tensor is larger than this machine's address space")


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """StepFailed, which says what failed in one line, in place of an exception of somebody's network."""
    try:
        yield
    except (UserError, DependsOnNumbers, StepFailed):
        raise
    except Exception as error:
        if isinstance(error, MemoryError) or REFUSED in str(error) or OVERFLOWED in str(error):
            raise TooLarge(what) from error
        if SPARSE_TENSOR in str(error):
            raise StepFailed(what, f"a gradient {SPARSE}") from error
        reason = str(error).strip().partition("\n")[0]
        raise StepFailed(what, f"{type(error).__name__}: {reason}") from error


def build(network: UserNetwork, device: str | torch.device = "cpu") -> nn.Module:
    """The module, in training mode.

    Raises:
        StepFailed: if it cannot be built, has no parameter to train, or makes sparse gradients.
    """
    what = f"{network.title} cannot be built"
    with explained(what):
        model = network.build()
        if not isinstance(model, nn.Module):
            raise StepFailed(what, f"it returns a {type(model).__name__}, not a module")
        model.train().to(device)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise StepFailed(f"{network.title} cannot be trained", "it has no parameter to train")
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            dense = f"which has {module.weight.nbytes / 2**20:,.1f} MiB of gradients then"
            reason = f"the gradient of {name or 'the module'} {SPARSE}, {dense}"
            raise StepFailed(f"{network.title} cannot be asked about", reason)
    return model


def make_batch(network: UserNetwork, size: int, device: str | torch.device = "cpu") -> tuple[Any, Any]:
    """The inputs and targets of `size` samples, on the device.

    Raises:
        StepFailed: if they cannot be made, or are not of so many samples.
    """
    what = f"a batch of {size} cannot be made"
    if network.assumed:
        what = f"{what} ({network.assumed})"
    with explained(what):
        made = network.batch(size)
        _check_made(what, made, size)
        inputs, targets = made
        return tree_map_only(Tensor, lambda tensor: tensor.to(device), (inputs, targets))


def _check_made(what: str, made: Any, size: int) -> None:
    """Raises StepFailed unless `made` are inputs, whose first dimension is the sample, and targets."""
    if not isinstance(made, tuple | list):
        raise StepFailed(what, f"{MUST_RETURN.format(size)}, not a {type(made).__name__}")
    if len(made) != 2:
        raise StepFailed(what, f"{MUST_RETURN.format(size)}, not {len(made)}")
    inputs, _ = made
    tensors = _tensors(inputs)
    if not tensors:
        kinds = {type(leaf).__name__ for leaf in tree_iter(inputs)}
        raise StepFailed(what, f"the inputs of batch({size}) must be tensors, not {', '.join(sorted(kinds))}")
    for tensor in tensors:
        if tensor.dim() and len(tensor) % size:
            came = f"batch({size}) made an input of shape {tuple(tensor.shape)}"
            raise StepFailed(what, f"{came}, whose first dimension should be the sample, so {size}")


def _tensors(inputs: Any) -> list[Tensor]:
    return [leaf for leaf in tree_iter(inputs) if isinstance(leaf, Tensor)]


def check_batches(network: UserNetwork) -> None:
    """Raises StepFailed where the first dimension of an input does not grow with the samples.

    It may be a multiple of their number, as where the words of all texts lie one behind the other.
    """
    inputs_of_two, _ = hollow_if_possible(partial(make_batch, network, 2))
    inputs_of_four, _ = hollow_if_possible(partial(make_batch, network, 4))  # samples may come in pairs
    for two, four in zip(_tensors(inputs_of_two), _tensors(inputs_of_four), strict=False):
        if two.dim() and four.dim() and 2 * len(two) != len(four):
            came = f"batch(2) made inputs of shape {tuple(two.shape)}, and batch(4) of {tuple(four.shape)}"
            reason = f"{came}: the first dimension should be the sample, so 2 and 4"
            raise StepFailed(f"{network.title} cannot be asked about", reason)


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
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise StepFailed(f"the loss of {network.title} failed", f"the loss must be a scalar tensor, not {found}")
    if not loss.requires_grad:
        raise StepFailed(f"the loss of {network.title} failed", "it depends on no parameter that is trained")
    return loss


def backward(network: UserNetwork, loss: Tensor) -> None:
    """The gradients.

    Raises:
        StepFailed: if they cannot be computed.
    """
    with explained(f"the backward of {network.title} failed"):
        loss.backward()


def update(network: UserNetwork, optimizer: torch.optim.Optimizer) -> None:
    """The optimizer's step.

    Raises:
        StepFailed: if it fails.
    """
    with explained(f"the optimizer of {network.title} failed"):
        optimizer.step()


def make_optimizer(network: UserNetwork, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The network's optimizer, which takes all parameters at once, as torch's do on a GPU unless they are told.

    Raises:
        StepFailed: if it cannot be made.
    """
    with explained(f"the optimizer of {network.title} cannot be made"):
        return for_all_at_once(network.optimizer(parameters))


def for_all_at_once(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The same optimizer, which takes all parameters at once."""
    for group in optimizer.param_groups:
        if group.get("foreach", True) is None and not group.get("fused"):
            group["foreach"] = True
    return optimizer
