"""A level's train.py with one fault in it, on the last rank: `saboteur.py FAULT STEP LEVEL [the level's flags]`.

It strikes in step STEP, most where the loss is to be computed.
"""

import itertools
import os
import signal
import sys
import time
from types import SimpleNamespace

from torch.utils.data import DataLoader

from common import ladder
from common.args import parse_args
from common.instruments import prepare_process


def is_killed(module, step: int) -> None:
    _at_loss(module, step, lambda: os.kill(os.getpid(), signal.SIGKILL))


def hangs(module, step: int) -> None:
    _at_loss(module, step, lambda: time.sleep(3600))


def has_fewer_batches(module, step: int) -> None:
    """Uneven inputs: this rank's loaders end before the others'."""
    all_batches = DataLoader.__iter__
    DataLoader.__iter__ = lambda loader: itertools.islice(all_batches(loader), step - 1)


def _at_loss(module, step: int, strike) -> None:
    functional = module.F
    calls = itertools.count(1)

    def nll_loss(*args, **kwargs):
        if next(calls) == step:
            strike()
        return functional.nll_loss(*args, **kwargs)

    module.F = SimpleNamespace(nll_loss=nll_loss)


def main() -> None:
    fault, step, level, *flags = sys.argv[1:]
    module = ladder.load(level)
    args = prepare_process(parse_args(module.__file__, flags))
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        globals()[fault](module, int(step))
    module.train(args)


if __name__ == "__main__":
    main()
