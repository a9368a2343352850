"""A collective under `if rank == 0`: it meets another one, or nobody.

Collectives are matched by their order and by nothing else. Rank 0's extra
all-reduce for the log is answered by the next one that rank 1 calls for
something else. Here rank 1 adds rank 0's loss, 0.25, to its 300 correct answers
and goes on with 300.25. Rank 0 calls once more, nobody answers, and it hangs.
Let all ranks reduce and rank 0 print.
`TORCH_DISTRIBUTED_DEBUG=DETAIL` compares shapes, which are equal here; the
detector compares the lines that call.
"""

import linecache
import sys
from contextlib import contextmanager
from itertools import zip_longest

import torch
import torch.distributed as dist

from common.pitfalls.stage import at, places

LEVELS = ("02_ddp_raw", "03_accelerate")
WORLD_SIZE = 2
SYMPTOM = "hang"
TIMEOUT = 2


@contextmanager
def noted_all_reduces():
    """In it, `dist.all_reduce` first notes for all ranks which line calls."""
    lines, all_reduce = [], dist.all_reduce

    def noted(*args, **kwargs):
        caller = sys._getframe(1)
        number = caller.f_lineno
        code = linecache.getline(caller.f_code.co_filename, number)
        statement, _, _ = code.partition("#")
        lines.append(f"{statement.strip()} in line {number}")
        at("\n".join(lines))
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
    calls = [place.splitlines() for place in places()]
    for number, lines in enumerate(zip_longest(*calls), start=1):
        if len(set(lines)) > 1:
            ranks = (f"rank {r} calls {line}" for r, line in enumerate(lines))
            return f"all-reduce {number}: {', '.join(ranks)}"


def measure(outcome):
    if isinstance(outcome, RuntimeError):
        return "hangs"
    return f"sum {outcome:g}"
