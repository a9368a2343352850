"""Timing without synchronising: the clock is read before the work is done.

A CUDA kernel is put into a queue, and the call returns. What the clock then
shows is how long it took to ask. On a GPU, wait with `torch.cuda.synchronize()`
before each reading. What runs here makes the same mistake without a GPU: an
all-reduce with `async_op=True` returns at once and computes in a thread of its
own, and `wait` is what completes it.
"""

import time

import torch
import torch.distributed as dist

LEVELS = ("00_single_gpu", "01_data_parallel", "02_ddp_raw")


def wrong():
    tensor = torch.ones(16_000_000)
    dist.barrier()
    started = time.perf_counter()
    work = dist.all_reduce(tensor, async_op=True)
    return time.perf_counter() - started, work


def right():
    tensor = torch.ones(16_000_000)
    dist.barrier()
    started = time.perf_counter()
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    return time.perf_counter() - started, work


def detect(outcome):
    """To be called right after the clock was read."""
    timed, work = outcome
    if not work.is_completed():
        work.wait()
        return f"the clock shows {timed:.4f} s; the work was still under way"
