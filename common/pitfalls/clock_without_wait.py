"""Timing without synchronising: the clock is read before the work is done.

A CUDA kernel is put into a queue, and the call returns. What the clock then
shows is how long it took to ask. On a GPU, wait with `torch.cuda.synchronize()`
before each reading. A machine without one has the same mistake in an all-reduce
with `async_op=True`, which returns at once and computes in a thread of its own:
that is what runs here then, and `wait` is what completes it.
"""

import time

import torch
import torch.distributed as dist

LEVELS = ("00_single_gpu", "01_data_parallel", "02_ddp_raw")
WORLD_SIZE = 2
SYMPTOM = "silent"


def prepare():
    """A function that starts asynchronous work and returns one that waits."""
    if torch.cuda.is_available():
        matrix = torch.rand(4096, 4096, device="cuda")
        torch.mm(matrix, matrix)  # the first call sets up its library
        torch.cuda.synchronize()

        def launch():
            for _ in range(20):
                torch.mm(matrix, matrix)
            return torch.cuda.synchronize

        return launch
    tensor = torch.ones(16_000_000)
    dist.barrier()
    return lambda: dist.all_reduce(tensor, async_op=True).wait


def wrong():
    launch = prepare()
    started = time.perf_counter()
    wait = launch()
    return time.perf_counter() - started, wait


def right():
    launch = prepare()
    started = time.perf_counter()
    wait = launch()
    wait()
    return time.perf_counter() - started, wait


def detect(outcome):
    """To be called right after the clock was read."""
    seconds, wait = outcome
    read = time.perf_counter()
    wait()
    left = time.perf_counter() - read
    if left > seconds:
        timed, left = f"{seconds * 1e3:.1f} ms", f"{left * 1e3:.1f} ms"
        return f"the clock shows {timed}, and work went on for {left}"


def measure(outcome):
    slowest = torch.tensor(outcome[0])
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return f"timed {slowest * 1e3:.1f} ms"
