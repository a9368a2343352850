"""An observer of learning rate schedulers: how often this rank has stepped them."""

import functools
from collections.abc import Callable
from typing import Any

from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from common.doctor.record import Record


class SchedulerWatch:
    """The calls of `step` that a script makes, of torch's schedulers and of its own classes.

    A scheduler of schedulers steps those within, and a new one steps itself for the first learning rate: such calls
    are not the script's.
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self._depth = 0

    def install(self) -> None:
        for scheduler in vars(lr_scheduler).values():
            if isinstance(scheduler, type) and issubclass(scheduler, LRScheduler):
                self._watch(scheduler)
        begin = LRScheduler._initial_step

        @functools.wraps(begin)
        def noted(scheduler: LRScheduler) -> None:
            self._within(begin, scheduler)

        def begin_class(scheduler: type[LRScheduler], **kwargs: Any) -> None:
            super(LRScheduler, scheduler).__init_subclass__(**kwargs)
            self._watch(scheduler)

        LRScheduler._initial_step = noted  # type: ignore
        LRScheduler.__init_subclass__ = classmethod(begin_class)  # type: ignore

    def _watch(self, scheduler: type[LRScheduler]) -> None:
        if "step" not in vars(scheduler):
            return
        step = scheduler.step

        @functools.wraps(step)
        def noted(*args: Any, **kwargs: Any) -> None:
            if self._depth == 0:
                self._record.scheduler_steps += 1
            self._within(step, *args, **kwargs)

        scheduler.step = noted  # type: ignore

    def _within(self, call: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self._depth += 1
        try:
            call(*args, **kwargs)
        finally:
            self._depth -= 1
