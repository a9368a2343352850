"""A level's train.py with one fault in it, on the last rank: `saboteur.py FAULT STEP LEVEL [the level's flags]`."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from common import ladder

SAMPLES_BEFORE = None


def raises():
    raise ArithmeticError("the reason")


def is_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def leaves():
    os._exit(0)


def hangs():
    time.sleep(3600)


def reduces_alone():
    dist.all_reduce(torch.zeros(3))


FAULTS = {function.__name__: function for function in (raises, is_killed, leaves, hangs, reduces_alone)}


def main() -> None:
    fault, step, level, *flags = sys.argv[1:]
    module = ladder.load(level)
    sys.argv = [module.__file__, *flags]
    last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    calls = 0

    def nll_loss(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == int(step) and last:
            FAULTS[fault]()
        return honest.nll_loss(*args, **kwargs)

    honest = module.F
    module.F = type("functional", (), {"nll_loss": staticmethod(nll_loss)})
    module.main()


if __name__ == "__main__":
    main()
