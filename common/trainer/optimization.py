"""Optimizers and learning-rate schedules by name.

A schedule is a function of the step that gives the learning rate as a factor of `learning_rate`. The factors are those
of `transformers.optimization`, bit for bit.
"""

import math
import re
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")

# Biases and normalisation layers, by the names of their parameters.
_WITHOUT_DECAY = re.compile(r"bias|layernorm|rmsnorm|(^|\.|_)norm($|\.)")


def make_optimizer(model: nn.Module, args: Any, decay_names: Collection[str]) -> Optimizer:
    """The optimizer `args.optim`, in two parameter groups: `decay_names` get `args.weight_decay`, the others none."""
    with_decay: list[nn.Parameter] = []
    without_decay: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            group = with_decay if name in decay_names else without_decay
            group.append(parameter)
    groups = [
        {"params": with_decay, "weight_decay": args.weight_decay},
        {"params": without_decay, "weight_decay": 0.0},
    ]
    if args.optim in ("adamw_torch", "adamw_torch_fused"):
        fused = True if args.optim == "adamw_torch_fused" else None
        betas = (args.adam_beta1, args.adam_beta2)
        return torch.optim.AdamW(groups, lr=args.learning_rate, betas=betas, eps=args.adam_epsilon, fused=fused)
    by_name = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "rmsprop": torch.optim.RMSprop}
    return by_name[args.optim](groups, lr=args.learning_rate)


def decay_parameter_names(model: nn.Module) -> list[str]:
    """All but the parameters of nn.LayerNorm, and those whose names speak of a bias or a norm, as in `transformers`."""
    of_layer_norms: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            of_layer_norms.update(id(parameter) for parameter in module.parameters())
    names = []
    for name, parameter in model.named_parameters():
        if not _WITHOUT_DECAY.search(name.lower()) and id(parameter) not in of_layer_norms:
            names.append(name)
    return names


class Run(NamedTuple):
    """What a schedule knows of its training: the steps of warm-up, and all steps."""

    warmup: int
    total: int


def constant(step: int, run: Run) -> float:
    """The whole rate, without a warm-up."""
    return 1.0


def constant_with_warmup(step: int, run: Run) -> float:
    """A climb along a line, then the whole rate."""
    return step / run.warmup if step < run.warmup else 1.0


def linear(step: int, run: Run) -> float:
    """A climb along a line, then a fall along another, to 0 after the last step."""
    if step < run.warmup:
        return step / run.warmup
    return max(0.0, (run.total - step) / max(1, run.total - run.warmup))


def cosine(step: int, run: Run, num_cycles: float = 0.5) -> float:
    """A climb along a line, then a fall along half a wave, to 0 after the last step; or along `num_cycles` waves."""
    if step < run.warmup:
        return step / run.warmup
    progress = (step - run.warmup) / max(1, run.total - run.warmup)
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * progress)))


# Each is a function of the step, its `Run`, and what `lr_scheduler_kwargs` may say.
_FACTORS: dict[str, Callable[..., float]] = {
    "constant": constant,
    "constant_with_warmup": constant_with_warmup,
    "linear": linear,
    "cosine": cosine,
}
SCHEDULES = (*_FACTORS, "reduce_lr_on_plateau")


def make_scheduler(optimizer: Optimizer, args: Any, num_training_steps: int) -> LRScheduler:
    """The schedule `args.lr_scheduler_type` (one of `SCHEDULES`) over `num_training_steps` optimizer steps.

    All but "constant" and "reduce_lr_on_plateau" climb during the steps of warm-up. They are stepped once per
    optimizer step, whatever the number of processes; "reduce_lr_on_plateau" once per evaluation.

    Raises:
        TypeError: for a name in `args.lr_scheduler_kwargs` that the schedule does not have.
    """
    options = args.lr_scheduler_kwargs or {}
    if args.lr_scheduler_type.startswith("constant"):
        options = {}  # ignored, as in the original
    if args.lr_scheduler_type == "reduce_lr_on_plateau":
        return ReduceLROnPlateau(optimizer, **options)
    run = Run(args.get_warmup_steps(num_training_steps), num_training_steps)
    return LambdaLR(optimizer, partial(_FACTORS[args.lr_scheduler_type], run=run, **options))
