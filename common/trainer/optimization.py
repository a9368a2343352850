"""Optimizers and learning-rate schedules by name.

A schedule is a function of the step that gives the learning rate as a factor of `learning_rate`. The factors are those
of `transformers.optimization`, bit for bit.
"""

import math
import re
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

# Names of classes in `torch.optim`, where a script may have replaced them.
OPTIMIZERS = {
    "adamw_torch": "AdamW",
    "adamw_torch_fused": "AdamW",
    "sgd": "SGD",
    "adagrad": "Adagrad",
    "rmsprop": "RMSprop",
}

# Biases and normalisation layers, by the names of their parameters.
_WITHOUT_DECAY = re.compile(r"bias|layernorm|rmsnorm|(^|\.|_)norm($|\.)")


def parameter_groups(model: nn.Module, decay_names: Collection[str], weight_decay: float) -> list[dict[str, Any]]:
    """The parameters to train, in two groups: those of `decay_names` get `weight_decay`, the others none."""
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    with_decay = [parameter for name, parameter in trainable if name in decay_names]
    without_decay = [parameter for name, parameter in trainable if name not in decay_names]
    return [{"params": with_decay, "weight_decay": weight_decay}, {"params": without_decay, "weight_decay": 0.0}]


def decay_parameter_names(model: nn.Module) -> list[str]:
    """All but the parameters of nn.LayerNorm, and those whose names speak of a bias or a norm, as in `transformers`."""
    without_decay: set[nn.Parameter] = set()
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            without_decay.update(module.parameters())
    named = model.named_parameters()
    return [name for name, weight in named if weight not in without_decay and not _WITHOUT_DECAY.search(name.lower())]


class ScheduleLength(NamedTuple):
    """The steps of warm-up, all steps of a training, and its `learning_rate`, which the factors multiply."""

    warmup: int
    total: int
    start_lr: float

    def decay_progress(self, step: int) -> float:
        """The share of the steps after the warm-up that is done: 1 after the last one."""
        return (step - self.warmup) / max(1, self.total - self.warmup)


def constant(step: int, length: ScheduleLength) -> float:
    return 1.0


def linear(step: int, length: ScheduleLength) -> float:
    """A fall along a line, to 0 after the last step."""
    return max(0.0, (length.total - step) / max(1, length.total - length.warmup))


def wave(progress: float, num_cycles: float) -> float:
    """The height of a cosine wave between 1 and 0; half a wave (0.5 cycles) falls from 1 to 0."""
    return 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * progress))


def cosine(step: int, length: ScheduleLength, num_cycles: float = 0.5) -> float:
    """A fall along half a wave, to 0 after the last step; or along `num_cycles` waves."""
    return max(0.0, wave(length.decay_progress(step), num_cycles))


def cosine_with_restarts(step: int, length: ScheduleLength, num_cycles: int = 1) -> float:
    """`num_cycles` falls along half a wave, each from the whole rate to 0."""
    progress = length.decay_progress(step)
    if progress >= 1.0:
        return 0.0
    return wave((num_cycles * progress) % 1.0, 0.5)


def cosine_with_min_lr(
    step: int,
    length: ScheduleLength,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
) -> float:
    """A fall along half a wave to a lowest rate, which is given as such, or as a share of `learning_rate`."""
    if (min_lr is None) == (min_lr_rate is None):
        raise ValueError("lr_scheduler_kwargs need either min_lr or min_lr_rate")
    lowest = min_lr / length.start_lr if min_lr_rate is None else min_lr_rate
    return max(0.0, wave(length.decay_progress(step), num_cycles) * (1 - lowest) + lowest)


def polynomial(step: int, length: ScheduleLength, lr_end: float = 1e-7, power: float = 1.0) -> float:
    """A fall to the learning rate `lr_end`, along the power of what is left."""
    if length.start_lr <= lr_end:
        raise ValueError(f"lr_end ({lr_end}) must be smaller than learning_rate ({length.start_lr})")
    if step > length.total:
        return lr_end / length.start_lr
    remaining = 1 - length.decay_progress(step)
    return ((length.start_lr - lr_end) * remaining**power + lr_end) / length.start_lr


def inverse_sqrt(step: int, length: ScheduleLength, timescale: int | None = None) -> float:
    """A fall with the square root of the steps, that never ends."""
    if timescale is None:
        timescale = length.warmup or 10_000
    return 1.0 / math.sqrt((step + timescale - length.warmup) / timescale)


def warmup_stable_decay(
    step: int,
    length: ScheduleLength,
    num_decay_steps: int,
    num_stable_steps: int | None = None,
    warmup_type: str = "linear",
    decay_type: str = "cosine",
    min_lr_ratio: float = 0,
    num_cycles: float = 0.5,
) -> float:
    """A climb, the whole rate, and a fall in the last steps; either "linear", "cosine" or "1-sqrt"."""
    if not {warmup_type, decay_type} <= {"linear", "cosine", "1-sqrt"}:
        raise ValueError(f"warmup_type {warmup_type!r}, decay_type {decay_type!r}: not 'linear', 'cosine' or '1-sqrt'")
    if num_stable_steps is None:
        num_stable_steps = length.total - length.warmup - num_decay_steps
    decay_start = length.warmup + num_stable_steps
    if step < length.warmup:
        progress = step / length.warmup
        shapes = {
            "linear": progress,
            "cosine": 0.5 * (1.0 - math.cos(math.pi * progress)),
            "1-sqrt": 1.0 - math.sqrt(1.0 - progress),
        }
        factor = shapes[warmup_type]
    elif step < decay_start:
        return 1.0
    elif step < decay_start + num_decay_steps:
        progress = (step - decay_start) / num_decay_steps
        shapes = {"linear": 1.0 - progress, "cosine": wave(progress, num_cycles), "1-sqrt": 1.0 - math.sqrt(progress)}
        factor = shapes[decay_type]
    else:
        return min_lr_ratio
    return max(0.0, factor * (1.0 - min_lr_ratio) + min_lr_ratio)


# Each is a function of the step, its `ScheduleLength`, and the options in `lr_scheduler_kwargs`.
_SCHEDULES: dict[str, Callable[..., float]] = {
    "constant": constant,
    "constant_with_warmup": constant,
    "linear": linear,
    "cosine": cosine,
    "cosine_with_restarts": cosine_with_restarts,
    "cosine_with_min_lr": cosine_with_min_lr,
    "polynomial": polynomial,
    "inverse_sqrt": inverse_sqrt,
    "warmup_stable_decay": warmup_stable_decay,
}
SCHEDULES = (*_SCHEDULES, "reduce_lr_on_plateau")


def with_warmup(schedule: Callable[..., float], step: int, length: ScheduleLength, **options: Any) -> float:
    """A climb along a line during the warm-up, then the `schedule`."""
    # It is computed in the climb too, so that a wrong option is an error at once.
    factor = schedule(max(step, length.warmup), length, **options)
    return step / length.warmup if step < length.warmup else factor


def make_scheduler(optimizer: Optimizer, args: Any, num_training_steps: int) -> LRScheduler:
    """The schedule `args.lr_scheduler_type` (one of `SCHEDULES`) over `num_training_steps` optimizer steps.

    It is stepped once per optimizer step, whatever the number of processes; "reduce_lr_on_plateau" once per evaluation.
    """
    name = args.lr_scheduler_type
    options = args.lr_scheduler_kwargs or {}
    if name.startswith("constant"):
        options = {}  # the original ignores them too
    if name == "reduce_lr_on_plateau":
        return ReduceLROnPlateau(optimizer, **options)
    length = ScheduleLength(args.get_warmup_steps(num_training_steps), num_training_steps, optimizer.defaults["lr"])
    schedule = _SCHEDULES[name]
    if name not in ("constant", "warmup_stable_decay"):  # these have no climb, or one of their own
        schedule = partial(with_warmup, schedule)
    return LambdaLR(optimizer, partial(schedule, length=length, **options))


def follows_metric(scheduler: LRScheduler) -> bool:
    """True if the learning rate depends on the evaluations, and not on the step."""
    return isinstance(scheduler, ReduceLROnPlateau)


def set_mode(optimizer: Optimizer, mode: str) -> None:
    """Call the method `train` or `eval` of an optimizer that has it: a schedule-free one then swaps the weights."""
    enter_mode = getattr(optimizer, mode, None)
    if callable(enter_mode):
        enter_mode()
