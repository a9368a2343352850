"""Optimizers and learning-rate schedules by name."""

import math
import re

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")


def make_optimizer(model: nn.Module, args) -> Optimizer:
    """The optimizer `args.optim`, in two parameter groups: with `args.weight_decay` and without.

    Without are the parameters of nn.LayerNorm and those whose names speak of a bias or a norm, as in `transformers`.
    """
    spared = re.compile(r"bias|layernorm|rmsnorm|(^|\.|_)norm($|\.)")
    layer_norms = {id(p) for m in model.modules() if isinstance(m, nn.LayerNorm) for p in m.parameters()}
    groups = [{"params": [], "weight_decay": args.weight_decay}, {"params": [], "weight_decay": 0.0}]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decays = not spared.search(name.lower()) and id(parameter) not in layer_norms
            groups[0 if decays else 1]["params"].append(parameter)
    if args.optim.startswith("adamw"):
        betas, fused = (args.adam_beta1, args.adam_beta2), args.optim == "adamw_torch_fused" or None
        return torch.optim.AdamW(groups, lr=args.learning_rate, betas=betas, eps=args.adam_epsilon, fused=fused)
    by_name = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "rmsprop": torch.optim.RMSprop}
    return by_name[args.optim](groups, lr=args.learning_rate)


# Factors of the learning rate after warm-up: functions of the step, and of the first and the last one after warm-up.
_DECAYS = {
    "linear": lambda step, start, end: max(0.0, (end - step) / max(1, end - start)),
    "cosine": lambda step, start, end: math.cos(math.pi / 2 * min(1.0, (step - start) / max(1, end - start))) ** 2,
    "inverse_sqrt": lambda step, start, end: ((step - start) / (start or 10_000) + 1.0) ** -0.5,
    "constant_with_warmup": lambda step, start, end: 1.0,
    "constant": lambda step, start, end: 1.0,
}
SCHEDULES = (*_DECAYS, "reduce_lr_on_plateau")


def make_scheduler(optimizer: Optimizer, args, num_training_steps: int) -> LRScheduler:
    """The schedule `args.lr_scheduler_type` (one of `SCHEDULES`) over `num_training_steps` optimizer steps.

    All but "constant" and "reduce_lr_on_plateau" climb linearly from 0 during the steps of warm-up. They are stepped
    once per optimizer step, whatever the number of processes.
    """
    name = args.lr_scheduler_type
    if name == "reduce_lr_on_plateau":
        return ReduceLROnPlateau(optimizer)
    decay, warmup = _DECAYS[name], 0 if name == "constant" else args.get_warmup_steps(num_training_steps)
    return LambdaLR(optimizer, lambda step: step / warmup if step < warmup else decay(step, warmup, num_training_steps))
