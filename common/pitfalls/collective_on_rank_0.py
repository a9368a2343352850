"""A collective under `if rank == 0`: it meets another one, or nobody.

Collectives are matched by their order and by nothing else. Rank 0's extra
all-reduce for the log is answered by the next one that rank 1 calls for
something else: rank 1 goes on with a wrong number, and rank 0 waits for ever,
one call later. Let all ranks reduce and rank 0 print.
`TORCH_DISTRIBUTED_DEBUG=DETAIL` compares shapes, which are equal here; the
detector compares the lines that call.
"""

import sys
from contextlib import contextmanager
from itertools import zip_longest

import torch
import torch.distributed as dist

from common.pitfalls.stage import at, places

LEVELS = ("02_ddp_raw", "03_accelerate")
WORLD_SIZE = 2
TIMEOUT = 2


@contextmanager
def noted_all_reduces():
    """In it, `dist.all_reduce` first notes for all ranks which line calls."""
    lines, all_reduce = [], dist.all_reduce

    def noted(*args, **kwargs):
        lines.append(str(sys._getframe(1).f_lineno))
        at(" ".join(lines))
        return all_reduce(*args, **kwargs)

    dist.all_reduce = noted
    try:
        yield
    finally:
        dist.all_reduce = all_reduce


def wrong():
    loss, correct = torch.tensor(0.25), torch.tensor(300.0)
    with noted_all_reduces():
        if dist.get_rank() == 0:
            dist.all_reduce(loss)  # for the log
        dist.all_reduce(correct)
    return correct


def right():
    loss, correct = torch.tensor(0.25), torch.tensor(300.0)
    with noted_all_reduces():
        dist.all_reduce(loss)
        dist.all_reduce(correct)
    return correct


def detect(_):
    called = zip_longest(*(place.split() for place in places()))
    for number, lines in enumerate(called, start=1):
        if len(set(lines)) > 1:
            ranks = (f"rank {r} in line {line}" for r, line in enumerate(lines))
            return f"all-reduce {number}: {', '.join(ranks)}"


def measure(outcome):
    if isinstance(outcome, RuntimeError):
        return "hangs"
    return f"{outcome:g} correct"
