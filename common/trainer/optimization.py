"""Optimizers and learning-rate schedules by name.

A schedule is a function of the step that gives the learning rate as a factor of `learning_rate`. The factors are those
of `transformers.optimization`, bit for bit.
"""

import math
import re
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")

# Biases and normalisation layers, by the names of their parameters.
_WITHOUT_DECAY = re.compile(r"bias|layernorm|rmsnorm|(^|\.|_)norm($|\.)")


def make_optimizer(model: nn.Module, args: Any, decay_names: Collection[str]) -> Optimizer:
    """The optimizer `args.optim`, in two parameter groups: `decay_names` get `args.weight_decay`, the others none."""
    groups = _parameter_groups(model, args.weight_decay, decay_names)
    if args.optim in ("adamw_torch", "adamw_torch_fused"):
        fused = True if args.optim == "adamw_torch_fused" else None
        betas = (args.adam_beta1, args.adam_beta2)
        return torch.optim.AdamW(groups, lr=args.learning_rate, betas=betas, eps=args.adam_epsilon, fused=fused)
    by_name = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "rmsprop": torch.optim.RMSprop}
    return by_name[args.optim](groups, lr=args.learning_rate)


def decay_parameter_names(model: nn.Module) -> list[str]:
    """All but the parameters of nn.LayerNorm, and those whose names speak of a bias or a norm, as in `transformers`."""
    of_layer_norms = _parameters_of_layer_norms(model)
    names = []
    for name, parameter in model.named_parameters():
        if not _WITHOUT_DECAY.search(name.lower()) and id(parameter) not in of_layer_norms:
            names.append(name)
    return names


def _parameter_groups(model: nn.Module, weight_decay: float, decay_names: Collection[str]) -> list[dict[str, Any]]:
    with_decay = []
    without_decay = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if name in decay_names:
            with_decay.append(parameter)
        else:
            without_decay.append(parameter)
    return [
        {"params": with_decay, "weight_decay": weight_decay},
        {"params": without_decay, "weight_decay": 0.0},
    ]


def _parameters_of_layer_norms(model: nn.Module) -> set[int]:
    found: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            found.update(id(parameter) for parameter in module.parameters())
    return found


def _constant(step: int) -> float:
    return 1


def _constant_with_warmup(step: int, *, warmup: int) -> float:
    return step / warmup if step < warmup else 1.0


def _linear(step: int, *, warmup: int, total: int) -> float:
    if step < warmup:
        return step / warmup
    return max(0.0, (total - step) / max(1, total - warmup))


def _decay_progress(step: int, warmup: int, total: int) -> float:
    """The share of the decay after the warm-up that is done: 0 at its first step, 1 after its last."""
    return (step - warmup) / max(1, total - warmup)


def _cosine(step: int, *, warmup: int, total: int, num_cycles: float = 0.5, min_lr_rate: float = 0.0) -> float:
    if step < warmup:
        return step / warmup
    angle = math.pi * num_cycles * 2.0 * _decay_progress(step, warmup, total)
    factor = 0.5 * (1.0 + math.cos(angle))
    return max(0, factor * (1 - min_lr_rate) + min_lr_rate)


def _cosine_with_restarts(step: int, *, warmup: int, total: int, num_cycles: int = 1) -> float:
    if step < warmup:
        return step / warmup
    progress = _decay_progress(step, warmup, total)
    if progress >= 1.0:
        return 0.0
    progress_of_cycle = (num_cycles * progress) % 1.0
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress_of_cycle)))


def _polynomial(
    step: int, *, warmup: int, total: int, start_lr: float, lr_end: float = 1e-7, power: float = 1.0
) -> float:
    if step < warmup:
        return step / warmup
    if step > total:
        return lr_end / start_lr
    remaining = 1 - _decay_progress(step, warmup, total)
    learning_rate = (start_lr - lr_end) * remaining**power + lr_end
    return learning_rate / start_lr


def _inverse_sqrt(step: int, *, warmup: int, timescale: int | None = None) -> float:
    if step < warmup:
        return step / warmup
    if timescale is None:
        timescale = warmup or 10_000
    shift = timescale - warmup
    return 1.0 / math.sqrt((step + shift) / timescale)


def _cosine_warmup_with_min_lr(
    step: int,
    *,
    warmup: int,
    total: int,
    min_lr_rate: float,
    num_cycles: float = 0.5,
    warmup_lr_rate: float | None = None,
) -> float:
    if step < warmup:
        if warmup_lr_rate is None:
            return (step + 1.0) / max(1.0, warmup)
        return warmup_lr_rate + (1.0 - warmup_lr_rate) * step / max(1, warmup - 1)
    # It counts from 1, so that the lowest rate is reached in the last step.
    progress = (step - warmup + 1.0) / max(1.0, total - warmup)
    factor = 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * progress))
    return max(0, factor * (1 - min_lr_rate) + min_lr_rate)


def _warmup_shape(kind: str, progress: float) -> float:
    if kind == "linear":
        return progress
    if kind == "cosine":
        return 0.5 * (1.0 - math.cos(math.pi * progress))
    return 1.0 - math.sqrt(1.0 - progress)


def _decay_shape(kind: str, progress: float, num_cycles: float) -> float:
    if kind == "linear":
        return 1.0 - progress
    if kind == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * progress))
    return 1.0 - math.sqrt(progress)


def _warmup_stable_decay(
    step: int,
    *,
    warmup: int,
    stable: int,
    decay: int,
    warmup_type: str = "linear",
    decay_type: str = "cosine",
    min_lr_ratio: float = 0,
    num_cycles: float = 0.5,
) -> float:
    if step < warmup:
        factor = _warmup_shape(warmup_type, step / warmup)
    elif step < warmup + stable:
        return 1.0
    elif step < warmup + stable + decay:
        factor = _decay_shape(decay_type, (step - warmup - stable) / decay, num_cycles)
    else:
        return min_lr_ratio
    return max(0.0, factor * (1.0 - min_lr_ratio) + min_lr_ratio)


def _make_polynomial(optimizer: Optimizer, warmup: int, total: int, **options: Any) -> LambdaLR:
    start_lr = optimizer.defaults["lr"]
    lr_end = options.get("lr_end", 1e-7)
    if start_lr <= lr_end:
        raise ValueError(f"lr_end ({lr_end}) must be smaller than initial lr ({start_lr})")
    return LambdaLR(optimizer, partial(_polynomial, warmup=warmup, total=total, start_lr=start_lr, **options))


def _make_with_lowest_rate(
    factor: Callable[..., float],
    optimizer: Optimizer,
    warmup: int,
    total: int,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
    **options: Any,
) -> LambdaLR:
    if (min_lr is None) == (min_lr_rate is None):
        raise ValueError("lr_scheduler_kwargs need either min_lr or min_lr_rate")
    if min_lr is not None:
        min_lr_rate = min_lr / optimizer.defaults["lr"]
    return LambdaLR(optimizer, partial(factor, warmup=warmup, total=total, min_lr_rate=min_lr_rate, **options))


def _make_warmup_stable_decay(
    optimizer: Optimizer,
    warmup: int,
    total: int,
    num_decay_steps: int,
    num_stable_steps: int | None = None,
    **options: Any,
) -> LambdaLR:
    for name in ("warmup_type", "decay_type"):
        if options.get(name, "linear") not in ("linear", "cosine", "1-sqrt"):
            raise ValueError(f"Unknown {name}: {options[name]}, expected 'linear', 'cosine' or '1-sqrt'")
    stable = total - warmup - num_decay_steps if num_stable_steps is None else num_stable_steps
    factor = partial(_warmup_stable_decay, warmup=warmup, stable=stable, decay=num_decay_steps, **options)
    return LambdaLR(optimizer, factor)


# Schedules that are a function of the step, the steps of warm-up and the number of all steps, and of nothing else.
_FACTORS = {
    "linear": _linear,
    "cosine": _cosine,
    "cosine_with_restarts": _cosine_with_restarts,
}
# Schedules that look at the optimizer too, or work out more than one number first.
_MAKERS: dict[str, Callable[..., LambdaLR]] = {
    "polynomial": _make_polynomial,
    "cosine_with_min_lr": partial(_make_with_lowest_rate, _cosine),
    "cosine_warmup_with_min_lr": partial(_make_with_lowest_rate, _cosine_warmup_with_min_lr),
    "warmup_stable_decay": _make_warmup_stable_decay,
}
SCHEDULES = (
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "reduce_lr_on_plateau",
    *_FACTORS,
    *_MAKERS,
)


def make_scheduler(optimizer: Optimizer, args: Any, num_training_steps: int) -> LRScheduler:
    """The schedule `args.lr_scheduler_type` (one of `SCHEDULES`) over `num_training_steps` optimizer steps.

    All but "constant" and "reduce_lr_on_plateau" climb during the steps of warm-up. They are stepped once per
    optimizer step, whatever the number of processes; "reduce_lr_on_plateau" once per evaluation.

    Raises:
        TypeError: for a name in `args.lr_scheduler_kwargs` that the schedule does not have.
        ValueError: for a value there that the schedule cannot have.
    """
    name = args.lr_scheduler_type
    options = args.lr_scheduler_kwargs or {}
    warmup = args.get_warmup_steps(num_training_steps)
    if name == "constant":
        return LambdaLR(optimizer, _constant)
    if name == "reduce_lr_on_plateau":
        return ReduceLROnPlateau(optimizer, **options)
    if name == "constant_with_warmup":
        return LambdaLR(optimizer, partial(_constant_with_warmup, warmup=warmup))
    if name == "inverse_sqrt":
        return LambdaLR(optimizer, partial(_inverse_sqrt, warmup=warmup, **options))
    if name in _MAKERS:
        return _MAKERS[name](optimizer, warmup, num_training_steps, **options)
    return LambdaLR(optimizer, partial(_FACTORS[name], warmup=warmup, total=num_training_steps, **options))
