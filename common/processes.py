"""Ranks on this machine: real processes, started once for each world size and reused for every job.

    this program                      pipe           each of two processes, see common/rank_process.py
    ranks(2).run(function, argument)  —— Job ——————▶ function(argument), with the variables that torchrun would set
    the results in rank order         ◀—— Returned — it has returned
    RankFailed                        ◀—— Failed ——— it has raised
    RankFailed                        (ends)         the process has ended
    RankFailed                        (silent)       the time is over

This program alone supervises. After a failure it kills all ranks of the job, and the next job starts on new ones.
"""

import atexit
import contextlib
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch

from common.launch import free_port, rank_variables
from common.rank_process import Failed, Job, Returned, serve

# Once a rank has failed, the others have this time to answer. They may wait for it, and would do so for ever.
SECONDS_AFTER_FAILURE = 5
# Windows can only spawn.
_START_METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
_context: Any = multiprocessing.get_context(_START_METHOD)
if _START_METHOD == "forkserver":
    # Imported once and forked, not once per rank: torch's optimizers import its compiler, which takes seconds.
    _context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo"])


class RankFailed(RuntimeError):
    """A rank raised, ended or did not answer in time; the message says of each such rank why.

    Attributes:
        failures: why each of them failed. The first one failed first, and the others may have waited for it.
        process_ended: True if the process of one of them has ended.
    """

    def __init__(self, failures: dict[int, str], process_ended: bool = False) -> None:
        super().__init__("\n".join(f"rank {rank}: {failures[rank]}" for rank in sorted(failures)))
        self.failures = failures
        self.process_ended = process_ended


class Worker(NamedTuple):
    """The process of one rank, and our end of the pipe to it."""

    rank: int
    process: BaseProcess
    pipe: Connection


class Ranks:
    """`world_size` processes on this machine that run one job after another.

    They start with the first job. A job that needs a process group makes it and destroys it.

    Args:
        on_cpu: the processes see no GPU. Torch would start CUDA on the first one, also for jobs of the CPU.
        launched: a job has the variables that torchrun would set. Without them it is a program of one process.
    """

    def __init__(self, world_size: int, on_cpu: bool = False, launched: bool = True) -> None:
        self.world_size = world_size
        self.on_cpu = on_cpu
        self.launched = launched
        self.workers: list[Worker] = []  # none before the first job

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 120,
        environment: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> list:
        """Call `function(*args, **kwargs)` on every rank and return the results in rank order.

        `function`, its arguments and its results must be picklable. `environment` is added to the job's; `timeout`
        counts seconds from now until the last rank has answered.

        Raises:
            RankFailed: if a rank raises, ends or is silent. The processes are then thrown away.
        """
        if not self.workers:
            self.workers = [_start_worker(rank, self.on_cpu) for rank in range(self.world_size)]
        port = free_port()
        try:
            for worker in self.workers:
                variables = rank_variables(worker.rank, self.world_size, port) if self.launched else {}
                variables |= environment or {}
                with contextlib.suppress(ConnectionError):  # The rank has ended since the last job; _receive says so.
                    worker.pipe.send(Job(function, args, kwargs, variables))
            return self._receive_results(timeout)
        except BaseException:  # Also after Ctrl-C: late answers to this job would be taken for those to the next one.
            self.stop()
            raise

    def stop(self) -> None:
        for worker in self.workers:  # All at once: a rank that outlives another would report its loss.
            worker.process.kill()
        for worker in self.workers:
            worker.process.join()
            worker.pipe.close()
        self.workers = []

    def _receive_results(self, timeout: float) -> list:
        results: dict[int, Any] = {}
        failures: dict[int, Failed] = {}
        waiting: dict[Any, Worker] = {worker.pipe: worker for worker in self.workers}
        deadline = time.monotonic() + timeout
        while waiting:
            ready = wait(waiting, max(0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                worker = waiting.pop(pipe)
                answer = _receive(worker)
                if isinstance(answer, Failed):
                    failures[worker.rank] = answer
                    deadline = min(deadline, time.monotonic() + SECONDS_AFTER_FAILURE)
                else:
                    results[worker.rank] = answer.result
        for worker in waiting.values():
            state = "alive" if worker.process.is_alive() else "dead"
            failures[worker.rank] = Failed(f"no answer ({state})")
        if failures:
            reasons = {rank: failed.reason for rank, failed in failures.items()}
            raise RankFailed(reasons, process_ended=any(failed.process_ended for failed in failures.values()))
        return [results[rank] for rank in range(self.world_size)]


_pools: dict[tuple[int, bool], Ranks] = {}


def ranks(world_size: int, on_cpu: bool = False) -> Ranks:
    """This program's pool of `world_size` processes; with `on_cpu` the pool whose processes see no GPU.

    A pool ends with the program. On a machine without GPUs the two are the same.
    """
    key = (world_size, on_cpu and torch.cuda.device_count() > 0)
    if key not in _pools:
        _pools[key] = Ranks(*key)
    return _pools[key]


def started_pools() -> list[Ranks]:
    return [pool for pool in _pools.values() if pool.workers]


@atexit.register
def _stop_all() -> None:
    for pool in started_pools():
        pool.stop()


def _start_worker(rank: int, on_cpu: bool) -> Worker:
    ours, theirs = _context.Pipe()
    process = _context.Process(target=serve, args=(theirs, on_cpu), daemon=True)
    with _without_interrupts():
        process.start()
    theirs.close()
    return Worker(rank, process, ours)


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """A block in which SIGINT is blocked. Processes that start in it inherit that, so they never get a SIGINT.

    Ctrl-C reaches all processes of a terminal, but only the main one is to answer it. The ranks and the server that
    forks them import torch first, which takes seconds, before they could ignore the signal by themselves.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # Otherwise the first process would start it, and it unblocks SIGINT.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _receive(worker: Worker) -> Returned | Failed:
    try:
        return worker.pipe.recv()
    except (EOFError, ConnectionError):
        worker.process.join(SECONDS_AFTER_FAILURE)
        return Failed(f"the process ended with exit code {worker.process.exitcode}", process_ended=True)
