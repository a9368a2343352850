"""The cost of Python's interpreter lock (GIL) for threads that compute side by side, as DataParallel's replicas do.

A worker is a replica of BasicNet that computes forward again and again on one core. Two workers have a core each. As
two processes each has a lock of its own. As two threads of one process they share one: a thread can only run Python, or
call an operation of torch, while it holds the lock. An operation releases it while it computes. So the lock costs most
where operations are short: with few samples for each replica, or on a fast GPU.

Two threads of one process share more than that lock, and processes do not. They share the arena of glibc's allocator
(`common.allocator` asks for one), which has a lock of its own. What they cost over two processes is the price of both.
Torch's random generator for the CPU has a lock too; the replicas have no dropout, so that they draw nothing from it.
"""

import threading
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.harness import records
from benchmarks.harness.groups import Extent, Group, chosen
from benchmarks.harness.paired import measure
from benchmarks.harness.process_facts import process_facts
from common.model import BasicNet
from common.process_group import process_group
from common.processes import ranks

WORKERS = 2
SAMPLES = (1, 64)  # of one worker's batch
WARM_UP_FORWARDS = 5
ALONE = "one worker"
THREADS = f"{WORKERS} threads"
PROCESSES = f"{WORKERS} processes"
ROWS = (ALONE, THREADS, PROCESSES)


class Worker:
    """A replica and its batch. `run` is what a thread or a process does."""

    def __init__(self, samples: int) -> None:
        self.model: nn.Module = BasicNet(dropout=False)
        self.images = torch.randn(samples, 1, 28, 28)
        self.seconds = 0.0  # of one forward

    def forwards(self, count: int) -> None:
        for _ in range(count):
            self.model(self.images)

    def run(self, count: int, ready: threading.Barrier | None = None) -> None:
        """Time `count` forwards, after some that are not counted and, if there are others, when all are ready."""
        self.forwards(WARM_UP_FORWARDS)
        if ready is not None:
            ready.wait()
        began = time.perf_counter()
        self.forwards(count)
        self.seconds = (time.perf_counter() - began) / count


def in_threads(workers: int, samples: int, count: int) -> float:
    """In one process: the seconds that a forward took the slowest of so many threads."""
    torch.set_num_threads(1)
    ready = threading.Barrier(workers)
    replicas = [Worker(samples) for _ in range(workers)]
    threads = [threading.Thread(target=replica.run, args=(count, ready)) for replica in replicas]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(replica.seconds for replica in replicas)


def in_this_process(samples: int, count: int) -> float:
    """On one of several ranks, which begin together: the seconds that a forward took it."""
    torch.set_num_threads(1)
    with process_group():
        replica = Worker(samples)
        dist.barrier()
        replica.run(count)
        return replica.seconds


def rank_facts() -> dict:
    """On a rank: how the processes of all rows are set, see `process_facts`."""
    torch.set_num_threads(1)
    return process_facts()


def _in_processes(samples: int, count: int) -> float:
    return max(ranks(WORKERS).run(in_this_process, samples, count))


def _in_one_process(workers: int, samples: int, count: int) -> float:
    (seconds,) = ranks(1).run(in_threads, workers, samples, count)
    return seconds


def groups() -> list[Group]:
    return [Group(f"gil-{samples}", title(samples), ROWS, partial(measured, samples)) for samples in SAMPLES]


def title(samples: int) -> str:
    noun = "sample" if samples == 1 else "samples"
    return f"forward of BasicNet side by side: {samples} {noun} for each worker"


def measured(samples: int, rows: tuple[str, ...], extent: Extent) -> dict:
    """The record of these rows: µs of one forward."""
    count = 5 if extent.quick else max(20, 1000 // samples)
    seconds = {
        ALONE: partial(_in_one_process, 1, samples, count),
        THREADS: partial(_in_one_process, WORKERS, samples, count),
        PROCESSES: partial(_in_processes, samples, count),
    }
    contestants = {row: partial(_microseconds, run) for row, run in chosen(seconds, rows).items()}
    turns = measure(contestants, extent.rounds)
    (facts_of_rank,) = ranks(1).run(rank_facts)
    facts = {row: {"samples_per_worker": samples, "forwards": count, **facts_of_rank} for row in rows}
    pairs = [(THREADS, ALONE), (PROCESSES, ALONE), (THREADS, PROCESSES)]
    return records.group(title(samples), "µs", turns, facts, pairs)


def _microseconds(run: Callable[[], float]) -> float:
    return 1e6 * run()


if __name__ == "__main__":
    raise SystemExit("error: a suite is run by: pytest benchmarks -k test_interpreter_lock")
