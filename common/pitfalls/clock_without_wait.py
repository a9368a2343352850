"""Timing without synchronising: the clock is read before the work is done.

A CUDA kernel is put into a queue, and the call returns. What the clock then
shows is how long it took to ask. On a GPU, wait with `torch.cuda.synchronize()`
before each reading. Here an all-reduce stands for the kernel. The call returns
at once, and the work is done when the last rank has joined: rank 1 is late.
"""

import time

import torch
import torch.distributed as dist


def wait_on_rank_1():
    if dist.get_rank() == 1:
        time.sleep(0.3)


def wrong():
    wait_on_rank_1()
    started = time.perf_counter()
    work = dist.all_reduce(torch.ones(1_000_000), async_op=True)
    return time.perf_counter() - started, work


def right():
    wait_on_rank_1()
    started = time.perf_counter()
    work = dist.all_reduce(torch.ones(1_000_000), async_op=True)
    work.wait()
    return time.perf_counter() - started, work


def detect(outcome):
    """Call it right after the clock was read."""
    seconds, work = outcome
    if not work.is_completed():
        return f"the clock shows {seconds:.4f} s; nobody waited for the work"
