"""The parts of an optimizer step, timed from outside while a level's own train.py runs.

Nothing in a level is changed. Every level calls the same few functions: the loader, the network's forward, `backward`,
the optimizer. While `watching` lasts, each of them notes when it begins and when it ends. A part that lies within
another one, such as DataParallel's copies within its forward, is taken out of it, so that the parts do not overlap.

Every second step is left alone: nothing is noted but when it ended. These are the whole that the parts have to add up
to. They ran between the watched steps, so that a drift of the machine is in both.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter

from common.accelerator import Accelerator
from common.model import BasicNet
from common.process_group import is_distributed
from common.small import data_parallel

LOADING = "loading"
COPIES = "replicate, scatter, gather"
FORWARD = "forward and loss"
BACKWARD = "backward"
AVERAGING = "averaging, not hidden"
WAITING = "waiting for the slower rank"
GRADIENT_NORM = "norm of the gradients"
OPTIMIZER = "optimizer"
PYTHON = "Python around it"


class StepTimes(NamedTuple):
    """The seconds of one step, from the end of the optimizer's work before it to the end of its own.

    Attributes:
        parts: the seconds of each part; None for a step that was left alone.
    """

    seconds: float
    parts: dict[str, float] | None


class StepClock:
    """Charges the time of the main thread to the part that it is in, the innermost one where several are entered.

    Attributes:
        steps: those that have ended, without the first one, which begins with the run.
    """

    def __init__(self) -> None:
        self.steps: list[StepTimes] = []
        self._main_thread = threading.get_ident()
        self._is_watching = False
        self._seconds: dict[str, float] = defaultdict(float)
        self._entered: list[str] = []
        self._charged_until = 0.0
        self._step_began: float | None = None
        self._last_gradient = 0.0
        self._hooked: set[Tensor] = set()

    def is_on(self) -> bool:
        """Is this step watched, and is this the main thread? DataParallel's replicas have threads of their own."""
        return self._is_watching and threading.get_ident() == self._main_thread

    def enter(self, part: str) -> None:
        self._charge(time.perf_counter())
        self._entered.append(part)

    def leave(self) -> None:
        self._charge(time.perf_counter())
        self._entered.pop()

    def leave_backward(self) -> None:
        """Leave backward. What followed the last gradient is DDP's averaging, if there is a process group."""
        if is_distributed():
            self._charge(self._last_gradient)
            self._entered[-1] = AVERAGING
        self.leave()

    def note_gradient(self, parameter: Tensor) -> None:
        """Called by autograd when it has added up the gradient of a parameter."""
        self._last_gradient = time.perf_counter()

    def begin_update(self, optimizer: Optimizer, *_: Any) -> None:
        """The optimizer's step begins; in its first one the clock learns which parameters there are."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in self._hooked:
                    self._hooked.add(parameter)
                    parameter.register_post_accumulate_grad_hook(self.note_gradient)
        if self.is_on():
            self.enter(OPTIMIZER)

    def end_update(self, *_: Any) -> None:
        """The optimizer's step has ended, and with it this step of the training."""
        now = time.perf_counter()
        if self.is_on():
            self._charge(now)
            self._entered.pop()
        if self._step_began is not None:
            parts = dict(self._seconds) if self._is_watching else None
            self.steps.append(StepTimes(now - self._step_began, parts))
        self._is_watching = not self._is_watching
        self._seconds.clear()
        self._charged_until = now
        self._step_began = now

    def _charge(self, until: float) -> None:
        part = self._entered[-1] if self._entered else PYTHON
        self._seconds[part] += until - self._charged_until
        self._charged_until = until


@contextmanager
def watching() -> Iterator[StepClock]:
    """Watch the optimizer steps of a level that trains in the calling thread."""
    clock = StepClock()
    with ExitStack() as watched:
        for owner, name, part in (
            (_BaseDataLoaderIter, "__next__", LOADING),
            (data_parallel, "replicate", COPIES),
            (data_parallel, "scatter", COPIES),
            (data_parallel, "gather", COPIES),
            (data_parallel.EmulatedDataParallel, "forward", FORWARD),
            (BasicNet, "forward", FORWARD),
            (torch.nn.functional, "nll_loss", FORWARD),
            (Accelerator, "clip_grad_norm_", GRADIENT_NORM),
            (Optimizer, "zero_grad", OPTIMIZER),
            (nn.Module, "zero_grad", OPTIMIZER),  # a Trainer lets the model drop its gradients
        ):
            watched.enter_context(patch.object(owner, name, _timed(clock, getattr(owner, name), part, clock.leave)))
        backward = _timed(clock, Tensor.backward, BACKWARD, clock.leave_backward)
        watched.enter_context(patch.object(Tensor, "backward", backward))
        for hook in (
            register_optimizer_step_pre_hook(clock.begin_update),
            register_optimizer_step_post_hook(clock.end_update),
        ):
            watched.callback(hook.remove)
        yield clock


def _timed(clock: StepClock, function: Callable, part: str, leave: Callable[[], None]) -> Callable:
    """`function`, whose time in a watched step counts as `part`."""

    @wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        if not clock.is_on():
            return function(*args, **kwargs)
        clock.enter(part)
        try:
            return function(*args, **kwargs)
        finally:
            leave()

    return timed
