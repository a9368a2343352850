"""Timing without synchronising: the clock is read before the work is done.

A CUDA kernel is put into a queue, and the call returns. What the clock then
shows is how long it took to ask. On a GPU, wait with `torch.cuda.synchronize()`
before each reading. Here a delayed all-reduce stands for the kernel.
"""

import time

import torch
import torch.distributed as dist


class DelayedAllReduce:
    """An all-reduce that begins when somebody waits for it.

    A real one may be done before anybody looks, and then no mistake shows.
    """

    def __init__(self, tensor):
        self.tensor = tensor
        self.completed = False

    def is_completed(self):
        return self.completed

    def wait(self):
        dist.all_reduce(self.tensor)
        self.completed = True


def wrong():
    tensor = torch.ones(1_000_000)
    started = time.perf_counter()
    work = DelayedAllReduce(tensor)
    return time.perf_counter() - started, work


def right():
    tensor = torch.ones(1_000_000)
    started = time.perf_counter()
    work = DelayedAllReduce(tensor)
    work.wait()
    return time.perf_counter() - started, work


def detect(outcome):
    """Call it right after the clock was read."""
    seconds, work = outcome
    if not work.is_completed():
        return f"the clock shows {seconds:.4f} s; nobody waited for the work"
