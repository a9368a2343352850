"""One training step of somebody else's network, and one clear line for whatever fails in it."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
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
        _check_samples(what, network, _shapes(inputs), size)
        return tree_map_only(Tensor, lambda tensor: tensor.to(device), (inputs, targets))


def _check_made(what: str, made: Any, size: int) -> None:
    """Raises StepFailed unless `made` are inputs, with a tensor among them, and targets."""
    if not isinstance(made, tuple | list):
        raise StepFailed(what, f"{MUST_RETURN.format(size)}, not a {type(made).__name__}")
    if len(made) != 2:
        raise StepFailed(what, f"{MUST_RETURN.format(size)}, not {len(made)}")
    inputs, _ = made
    if not _shapes(inputs):
        kinds = {type(leaf).__name__ for leaf in tree_iter(inputs)}
        raise StepFailed(what, f"the inputs of batch({size}) must be tensors, not {', '.join(sorted(kinds))}")


def _shapes(inputs: Any) -> list[torch.Size]:
    return [leaf.shape for leaf in tree_iter(inputs) if isinstance(leaf, Tensor)]


def _check_samples(what: str, network: UserNetwork, shapes: list[torch.Size], size: int) -> None:
    """Raises StepFailed unless the first dimension of each input is the sample, but for those that samples share."""
    for position, shape in enumerate(shapes):
        if shape and shape[0] % size and position not in network.shared:
            came = f"batch({size}) made an input of shape {tuple(shape)}"
            raise StepFailed(what, f"{came}, whose first dimension should be the sample, so {size}")


def with_shared_inputs(network: UserNetwork) -> UserNetwork:
    """The network, which knows those inputs that keep their shape where others grow with the samples.

    Raises:
        StepFailed: where the first dimension of another input does not grow with the samples. It may be a multiple of
            their number, as where the words of all texts lie one behind the other.
    """
    if not network.has_own_batch:
        return network
    of_two = _shapes_of(network, 2)
    of_four = _shapes_of(network, 4)  # samples may come in pairs
    pairs = list(zip(of_two, of_four, strict=False))
    if any(two != four for two, four in pairs):
        kept = [position for position, (two, four) in enumerate(pairs) if two == four]
        network = replace(network, shared=frozenset(kept))
    _check_samples("a batch of 2 cannot be made", network, of_two, 2)
    _check_samples("a batch of 4 cannot be made", network, of_four, 4)
    for position, (two, four) in enumerate(pairs):
        if position not in network.shared and two and four and 2 * two[0] != four[0]:
            came = f"batch(2) made inputs of shape {tuple(two)}, and batch(4) of {tuple(four)}"
            reason = f"{came}: the first dimension should be the sample, so 2 and 4"
            raise StepFailed(f"{network.title} cannot be asked about", reason)
    return network


def _shapes_of(network: UserNetwork, size: int) -> list[torch.Size]:
    """The shapes of the inputs of `size` samples."""
    what = f"a batch of {size} cannot be made"

    def shapes() -> list[torch.Size]:
        with explained(what):
            made = network.batch(size)
            _check_made(what, made, size)
        inputs, _ = made
        return _shapes(inputs)

    return hollow_if_possible(shapes)


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
    what = f"the optimizer of {network.title} cannot be made"
    with explained(what):
        optimizer = network.optimizer(parameters)
        if not isinstance(optimizer, torch.optim.Optimizer):
            reason = (
                f"optimizer(parameters) must return one optimizer of torch, not a {type(optimizer).__name__}; several "
                "need as much as one with a group of parameters for each"
            )
            raise StepFailed(what, reason)
    return for_all_at_once(optimizer)


def for_all_at_once(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The same optimizer, which takes all parameters at once."""
    for group in optimizer.param_groups:
        if group.get("foreach", True) is None and not group.get("fused"):
            group["foreach"] = True
    return optimizer
