"""A level's training with a fault on its last rank: `fault_injection.py FAULT STEP LEVEL [the level's flags]`."""

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

from torch.utils.data import DataLoader

from common import ladder
from common.args import parse_args
from common.start import prepare_process


def is_killed(module: ModuleType, step: int) -> None:
    call_before_loss(module, step, lambda: os.kill(os.getpid(), signal.SIGKILL))


def hangs(module: ModuleType, step: int) -> None:
    call_before_loss(module, step, lambda: time.sleep(3600))


def has_fewer_batches(module: ModuleType, step: int) -> None:
    """Uneven inputs: this rank's loaders end before the others'."""
    all_batches = DataLoader.__iter__
    DataLoader.__iter__ = lambda loader: itertools.islice(all_batches(loader), step - 1)


FAULTS = {"is_killed": is_killed, "hangs": hangs, "has_fewer_batches": has_fewer_batches}


def call_before_loss(module: ModuleType, step: int, action: Callable[[], object]) -> None:
    """Call `action` where the level computes the loss of step number `step`."""
    functional = module.F
    calls = itertools.count(1)

    def nll_loss(*args, **kwargs):
        if next(calls) == step:
            action()
        return functional.nll_loss(*args, **kwargs)

    module.F = SimpleNamespace(nll_loss=nll_loss)


def train(fault: str, step: int, level: str, flags: list[str]) -> None:
    module = ladder.load(level)
    args = prepare_process(parse_args(module.__file__, flags))
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        FAULTS[fault](module, step)
    module.train(args)


if __name__ == "__main__":
    fault, step, level, *flags = sys.argv[1:]
    train(fault, int(step), level, flags)
