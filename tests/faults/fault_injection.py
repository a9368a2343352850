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


def kill(level: ModuleType, step: int) -> None:
    call_before_loss(level, step, lambda: os.kill(os.getpid(), signal.SIGKILL))


def hang(level: ModuleType, step: int) -> None:
    call_before_loss(level, step, lambda: time.sleep(3600))


def end_loaders(level: ModuleType, step: int) -> None:
    """Uneven inputs: this rank's loaders end before this step, and the others' go on."""
    all_batches = DataLoader.__iter__
    DataLoader.__iter__ = lambda loader: itertools.islice(all_batches(loader), step - 1)


FAULTS = {"kill": kill, "hang": hang, "end_loaders": end_loaders}


def call_before_loss(level: ModuleType, step: int, action: Callable[[], object]) -> None:
    """Call `action` where the level computes the loss of step number `step`."""
    functional = level.F
    calls = itertools.count(1)

    def nll_loss(*args, **kwargs):
        if next(calls) == step:
            action()
        return functional.nll_loss(*args, **kwargs)

    level.F = SimpleNamespace(nll_loss=nll_loss)


def train(fault: str, step: int, level: str, flags: list[str]) -> None:
    module = ladder.load(level)
    args = prepare_process(parse_args(module.__file__, flags))
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        FAULTS[fault](module, step)
    module.train(args)


if __name__ == "__main__":
    fault, step, level, *flags = sys.argv[1:]
    train(fault, int(step), level, flags)
