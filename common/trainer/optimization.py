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
    """What a schedule knows of its training: the steps of warm-up, all steps, and the learning rate at the start."""

    warmup: int
    total: int
    start_lr: float

    def decay_progress(self, step: int) -> float:
        """The share of the decay after the warm-up that is done: 0 at its first step, 1 after its last."""
        return (step - self.warmup) / max(1, self.total - self.warmup)

    def lowest_rate(self, min_lr: float | None, min_lr_rate: float | None) -> float:
        """The lowest factor of a schedule that is given it, or the learning rate there."""
        if (min_lr is None) == (min_lr_rate is None):
            raise ValueError("lr_scheduler_kwargs need either min_lr or min_lr_rate")
        return min_lr / self.start_lr if min_lr_rate is None else min_lr_rate


def _constant_with_warmup(step: int, run: Run) -> float:
    return step / run.warmup if step < run.warmup else 1.0


def _linear(step: int, run: Run) -> float:
    if step < run.warmup:
        return step / run.warmup
    return max(0.0, (run.total - step) / max(1, run.total - run.warmup))


def _cosine(step: int, run: Run, num_cycles: float = 0.5, min_lr_rate: float = 0.0) -> float:
    if step < run.warmup:
        return step / run.warmup
    angle = math.pi * num_cycles * 2.0 * run.decay_progress(step)
    factor = 0.5 * (1.0 + math.cos(angle))
    return max(0, factor * (1 - min_lr_rate) + min_lr_rate)


def _cosine_with_restarts(step: int, run: Run, num_cycles: int = 1) -> float:
    if step < run.warmup:
        return step / run.warmup
    progress = run.decay_progress(step)
    if progress >= 1.0:
        return 0.0
    progress_of_cycle = (num_cycles * progress) % 1.0
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress_of_cycle)))


def _cosine_with_min_lr(
    step: int, run: Run, num_cycles: float = 0.5, min_lr: float | None = None, min_lr_rate: float | None = None
) -> float:
    return _cosine(step, run, num_cycles, run.lowest_rate(min_lr, min_lr_rate))


def _cosine_warmup_with_min_lr(
    step: int,
    run: Run,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
    warmup_lr_rate: float | None = None,
) -> float:
    lowest = run.lowest_rate(min_lr, min_lr_rate)
    if step < run.warmup:
        if warmup_lr_rate is None:
            return (step + 1.0) / max(1.0, run.warmup)
        return warmup_lr_rate + (1.0 - warmup_lr_rate) * step / max(1, run.warmup - 1)
    # It counts from 1, so that the lowest rate is reached in the last step.
    progress = (step - run.warmup + 1.0) / max(1.0, run.total - run.warmup)
    factor = 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * progress))
    return max(0, factor * (1 - lowest) + lowest)


def _polynomial(step: int, run: Run, lr_end: float = 1e-7, power: float = 1.0) -> float:
    if run.start_lr <= lr_end:
        raise ValueError(f"lr_end ({lr_end}) must be smaller than initial lr ({run.start_lr})")
    if step < run.warmup:
        return step / run.warmup
    if step > run.total:
        return lr_end / run.start_lr
    remaining = 1 - run.decay_progress(step)
    learning_rate = (run.start_lr - lr_end) * remaining**power + lr_end
    return learning_rate / run.start_lr


def _inverse_sqrt(step: int, run: Run, timescale: int | None = None) -> float:
    if step < run.warmup:
        return step / run.warmup
    if timescale is None:
        timescale = run.warmup or 10_000
    shift = timescale - run.warmup
    return 1.0 / math.sqrt((step + shift) / timescale)


def _warmup_stable_decay(
    step: int,
    run: Run,
    num_decay_steps: int,
    num_stable_steps: int | None = None,
    warmup_type: str = "linear",
    decay_type: str = "cosine",
    min_lr_ratio: float = 0,
    num_cycles: float = 0.5,
) -> float:
    for kind in (warmup_type, decay_type):
        if kind not in ("linear", "cosine", "1-sqrt"):
            raise ValueError(f"Unknown warmup_type or decay_type: {kind}, expected 'linear', 'cosine' or '1-sqrt'")
    stable = run.total - run.warmup - num_decay_steps if num_stable_steps is None else num_stable_steps
    end_of_stable = run.warmup + stable
    if run.warmup <= step < end_of_stable:
        return 1.0
    if step >= end_of_stable + num_decay_steps:
        return min_lr_ratio
    if step < run.warmup:
        progress = step / run.warmup
        shapes = {
            "linear": progress,
            "cosine": 0.5 * (1.0 - math.cos(math.pi * progress)),
            "1-sqrt": 1.0 - math.sqrt(1.0 - progress),
        }
        factor = shapes[warmup_type]
    else:
        progress = (step - end_of_stable) / num_decay_steps
        shapes = {
            "linear": 1.0 - progress,
            "cosine": 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * progress)),
            "1-sqrt": 1.0 - math.sqrt(progress),
        }
        factor = shapes[decay_type]
    return max(0.0, factor * (1.0 - min_lr_ratio) + min_lr_ratio)


# Each is a function of the step, its `Run`, and what `lr_scheduler_kwargs` may say.
_FACTORS: dict[str, Callable[..., float]] = {
    "constant": lambda step, run: 1,
    "constant_with_warmup": _constant_with_warmup,
    "inverse_sqrt": _inverse_sqrt,
    "linear": _linear,
    "cosine": _cosine,
    "cosine_with_restarts": _cosine_with_restarts,
    "polynomial": _polynomial,
    "cosine_with_min_lr": _cosine_with_min_lr,
    "cosine_warmup_with_min_lr": _cosine_warmup_with_min_lr,
    "warmup_stable_decay": _warmup_stable_decay,
}
SCHEDULES = (*_FACTORS, "reduce_lr_on_plateau")


def make_scheduler(optimizer: Optimizer, args: Any, num_training_steps: int) -> LRScheduler:
    """The schedule `args.lr_scheduler_type` (one of `SCHEDULES`) over `num_training_steps` optimizer steps.

    All but "constant" and "reduce_lr_on_plateau" climb during the steps of warm-up. They are stepped once per
    optimizer step, whatever the number of processes; "reduce_lr_on_plateau" once per evaluation.

    Raises:
        TypeError: for a name in `args.lr_scheduler_kwargs` that the schedule does not have.
        ValueError: for a value there that the schedule cannot have.
    """
    options = args.lr_scheduler_kwargs or {}
    if args.lr_scheduler_type.startswith("constant"):
        options = {}  # ignored, as in the original
    if args.lr_scheduler_type == "reduce_lr_on_plateau":
        return ReduceLROnPlateau(optimizer, **options)
    run = Run(args.get_warmup_steps(num_training_steps), num_training_steps, optimizer.defaults["lr"])
    return LambdaLR(optimizer, partial(_FACTORS[args.lr_scheduler_type], run=run, **options))
