"""The loss of a micro-batch, and the number of items in a step that it may be divided by."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from common.accelerator.logging import get_logger
from common.accelerator.utils import is_compiled_module
from common.nested import leaves
from common.trainer.batches import call_model, model_inside, split_labels

logger = get_logger(__name__)

# The loss types for which `LOSS_MAPPING` of `transformers` has `ForCausalLMLoss`.
CAUSAL_LOSS_TYPES = ("ForCausalLM", "ForConditionalGeneration", "CsmForConditionalGeneration")


def takes_num_items(trainer: Any) -> bool:
    """True if the loss depends on the number of labels in the step. Scripts may change both attributes."""
    return trainer.compute_loss_func is not None or trainer.model_accepts_loss_kwargs


def count_items(trainer: Any, window: list[Any], is_collective: bool = True) -> Tensor | None:
    """Labels other than -100 in these batches of all ranks; None if nobody needs them, or a batch has no labels.

    Unless `is_collective`, the other ranks are taken to have as many, because one of them may have no batch.
    """
    if not takes_num_items(trainer):
        return None
    accelerator = trainer.accelerator
    total = torch.zeros((), dtype=torch.int64, device=accelerator.device)
    for batch in window:
        count = count_labels(batch, trainer._loss_shifts_labels)
        if count is None:
            return None
        total += count.to(total.device)
    of_ranks = accelerator.gather(total) if is_collective else total * accelerator.num_processes
    # A float: a loss in half precision becomes float32 when it is divided by it.
    return of_ranks.sum().to(torch.get_default_dtype())


def loss_factor(trainer: Any, num_items: Tensor | None) -> int:
    """The number by which `compute_loss` multiplies a loss: that of the ranks if the labels of all divide it, else 1.

    DDP takes the mean of the ranks' gradients, and the step needs their sum.
    """
    is_divided = num_items is not None and takes_num_items(trainer)
    return trainer.accelerator.num_processes if is_divided else 1


def loss_divisor(trainer: Any, num_items: Tensor | None) -> int:
    """The number by which `training_step` divides a loss: a mean by the step's micro-batches, a share of the step by 1.

        the loss comes from         for a batch with labels    without labels
        a model without **kwargs    a mean                     a mean
        a model with **kwargs       a share, sum / num_items   a mean
        a `compute_loss_func`       a share, sum / num_items   a share, whatever it returns

    An override of `compute_loss` returns the same, a share times the `loss_factor`; or a mean if it lacks the argument
    `num_items_in_batch`. By `loss_is_scaled_for_ga` a subclass says that all are shares (True) or means (False).
    """
    is_mean = trainer.compute_loss_func is None and (num_items is None or not trainer.model_accepts_loss_kwargs)
    if trainer.loss_is_scaled_for_ga is not None:
        is_mean = not trainer.loss_is_scaled_for_ga
    elif not trainer._compute_loss_takes_count:
        is_mean = True
    return trainer.current_gradient_accumulation_steps if is_mean else 1


def call_compute_loss(trainer: Any, model: nn.Module, inputs: Any, num_items: Tensor | None, **options: Any) -> Any:
    """The result of `trainer.compute_loss`, which an override may have without `num_items_in_batch`."""
    if trainer._compute_loss_takes_count:
        options["num_items_in_batch"] = num_items
    with trainer.compute_loss_context_manager():
        return trainer.compute_loss(model, inputs, **options)


def forward(trainer: Any, model: nn.Module, inputs: Any, num_items: Tensor | None) -> Any:
    """The outputs of a model, which is given `num_items` if it takes it."""
    if num_items is None or not trainer.model_accepts_loss_kwargs:
        return call_model(model, inputs)
    is_first_step = model.training and trainer.state.global_step == 0
    with warn_if_unused(trainer, model, num_items) if is_first_step else nullcontext():
        return call_model(model, inputs, num_items_in_batch=num_items)


@contextmanager
def warn_if_unused(trainer: Any, model: nn.Module, num_items: Tensor) -> Iterator[None]:
    """A block in which a model is given `num_items`. It warns if nothing is computed with it, or read from it.

    A `**kwargs` does not tell whether a model divides its loss by it. If it does not, each share of the step is a mean,
    and no error shows that their sum is too large.
    """
    shares_of_step = trainer.accelerator.num_processes * trainer.current_gradient_accumulation_steps
    # Within the check, torch would compile a model for this step alone, and once more for all others.
    is_compiled = any(is_compiled_module(module) or module._compiled_call_impl for module in model.modules())
    if trainer.compute_loss_func is not None or shares_of_step == 1 or is_compiled:
        yield
        return
    with NotesUse(num_items) as notes:
        yield
    if not notes.is_used:
        logger.warning_once(
            f"the model takes num_items_in_batch, in its **kwargs, and does not use it: its loss is {shares_of_step} "
            "times too large, and gradients are too. Set accepts_loss_kwargs = False on the model"
        )


class NotesUse(TorchFunctionMode):
    """A block that notes whether a tensor is an argument of a function of torch."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.tensor = tensor
        self.is_used = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_argument = any(leaf is self.tensor for leaf in leaves((args, kwargs or {})))
        if is_argument and func.__name__ != "__get__":  # DDP asks for its device, which is no use
            self.is_used = True
        return func(*args, **(kwargs or {}))


def takes_any_keyword(function: Callable) -> bool:
    """True for a function with a `**kwargs`."""
    taken = inspect.signature(function).parameters.values()
    return any(parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in taken)


def takes_loss_keywords(model: nn.Module) -> bool:
    """True if `forward` has a `**kwargs`, for `num_items_in_batch`, or as the model's `accepts_loss_kwargs` says."""
    model = model_inside(model)
    if hasattr(model, "accepts_loss_kwargs"):
        return bool(model.accepts_loss_kwargs)
    return takes_any_keyword(model.forward)


def shifts_labels(model: nn.Module) -> bool:
    """True for a causal language model of `transformers`: the first label of each row is then no target."""
    model = model_inside(model)
    config = getattr(model, "config", None)
    is_encoder_decoder = getattr(config, "is_encoder_decoder", False)
    return getattr(model, "loss_type", None) in CAUSAL_LOSS_TYPES and not is_encoder_decoder


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
