"""The signature of a model: the parameters of its `forward`, and its labels.

Models from elsewhere come in wrappers. The signature of the model inside counts.
"""

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

# The loss types for which `LOSS_MAPPING` of `transformers` has `ForCausalLMLoss`.
CAUSAL_LOSS_TYPES = ("ForCausalLM", "ForConditionalGeneration", "CsmForConditionalGeneration")


def parameters(function: Callable) -> list[str]:
    """The names of a function's parameters."""
    return list(inspect.signature(function).parameters)


def model_inside(model: nn.Module) -> nn.Module:
    """The model itself, or the one in a wrapper: PEFT's adapters, a compiled model, DataParallel, or one of one's own.

    A wrapper of one's own has one child, and a `forward` that takes `*args` and `**kwargs` alone.
    """
    get_base_model: Any = getattr(model, "get_base_model", None)  # PEFT's
    if get_base_model is not None:
        return get_base_model()
    kinds = [parameter.kind for parameter in inspect.signature(model.forward).parameters.values()]
    children = list(model.children())
    if kinds != [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD] or len(children) != 1:
        return model
    return model_inside(children[0])


def find_labels(model: nn.Module) -> list[str]:
    """The parameters of the model's `forward` that have "label" in their name, and the positions of an answer."""
    inside = model_inside(model)
    others = ("start_positions", "end_positions") if "QuestionAnswering" in type(inside).__name__ else ()
    return [name for name in parameters(inside.forward) if "label" in name or name in others]


def takes_any_keyword(function: Callable) -> bool:
    """True for a function with a `**kwargs`."""
    taken = inspect.signature(function).parameters.values()
    return any(parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in taken)


def takes_keyword(function: Callable, name: str) -> bool:
    """True for a function with a parameter of this name, or with a `**kwargs`."""
    return name in parameters(function) or takes_any_keyword(function)


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
