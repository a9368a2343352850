"""The loss of an optimizer step, to which each micro-batch of each rank contributes a share.

`num_items` is the number of labels in the whole step. A function is a `compute_loss_func`.

    the loss comes from                     for a batch       it is              it becomes the share by
    a model without **kwargs                of any kind       a mean             / the number of micro-batches
    a model with **kwargs                   without labels    a mean             / the number of micro-batches
    a model with **kwargs, or a function    with labels       sum / num_items    · the number of ranks
    a function                              without labels    what it returns    nothing

Two lines in `trainer.py` do this: one in `training_step` divides a mean, and one in `compute_loss` multiplies a sum /
`num_items`, because DDP takes the mean of the ranks' gradients. Means give every micro-batch the same weight, however
many samples it has. Sums / `num_items` give every label the same weight.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from common.accelerator.logging import get_logger
from common.accelerator.utils import is_compiled_module
from common.nested import leaves
from common.trainer.batches import call_model, split_labels

logger = get_logger(__name__)


def get_loss(outputs: Any) -> Tensor:
    """The loss among a model's outputs: under "loss" in a dict or an object, first in a tuple, or a bare scalar."""
    if isinstance(outputs, Tensor):
        loss = outputs if outputs.dim() == 0 else None
    elif isinstance(outputs, tuple | list):
        loss = outputs[0]
    elif isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    else:
        loss = getattr(outputs, "loss", None)
    if loss is None:
        raise ValueError("the model returned no loss: let it, pass compute_loss_func, or override compute_loss")
    return loss


def count_labels(batch: Any, shifted: bool = False) -> Tensor | None:
    """The number of labels other than -100 in a batch, or None. If `shifted`, the first of each row does not count."""
    _, labels = split_labels(batch)
    if labels is not None and isinstance(batch, Mapping) and "shift_labels" in batch:
        labels = batch["shift_labels"]  # some collators of language models make them
    elif shifted and isinstance(labels, Tensor):
        labels = labels[..., 1:]
    return labels.ne(-100).sum() if isinstance(labels, Tensor) else None


def is_compiled(model: nn.Module) -> bool:
    """True if the model or a module in it is compiled. Compiled functions, which it may call, are not seen."""
    return any(is_compiled_module(module) or module._compiled_call_impl for module in model.modules())


class UseDetector(TorchFunctionMode):
    """A block in which `is_used` becomes True as soon as anything is computed with a tensor, or read from it."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.tensor = tensor
        self.is_used = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_argument = any(leaf is self.tensor for leaf in leaves((args, kwargs or {})))
        if is_argument and func.__name__ != "__get__":  # DDP asks for its device, which is no use
            self.is_used = True
        return func(*args, **(kwargs or {}))


def call_and_check_use(model: nn.Module, batch: Any, num_items: Tensor, shares_of_step: int) -> Any:
    """The outputs of a model that is given `num_items`, with a warning if it does not use it.

    A `**kwargs` does not tell whether a model divides its loss by it. If it does not, each share of the step
    is a mean, and no error shows that their sum is `shares_of_step` times too large.
    """
    with UseDetector(num_items) as detector:
        outputs = call_model(model, batch, num_items_in_batch=num_items)
    if not detector.is_used:
        logger.warning_once(
            f"the model takes num_items_in_batch, in its **kwargs, and does not use it: its loss is {shares_of_step} "
            "times too large, and gradients are too. Set accepts_loss_kwargs = False on the model"
        )
    return outputs
