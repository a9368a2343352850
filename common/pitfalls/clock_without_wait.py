"""Timing without synchronising: the clock is read before the work is done.

A CUDA kernel is put into a queue, and the call returns. What the clock then
shows is how long it took to ask. On a GPU, wait with `torch.cuda.synchronize()`
before each reading.

This pitfall needs work that goes on in the background, and a CPU's operations
end before they return. An all-reduce with `async_op=True` may also have ended
before anybody looks, and then the mistake would not show. So AllReduce imitates
its handle, and begins the work when somebody waits for it.
"""

import time

import torch
import torch.distributed as dist


class AllReduce:
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
    work = AllReduce(tensor)
    return time.perf_counter() - started, work


def right():
    tensor = torch.ones(1_000_000)
    started = time.perf_counter()
    work = AllReduce(tensor)
    work.wait()
    return time.perf_counter() - started, work


def detect(outcome):
    """To be called right after the clock was read."""
    seconds, work = outcome
    if not work.is_completed():
        return f"the clock shows {seconds:.4f} s; the work was still under way"
