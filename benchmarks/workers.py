"""Ranks for benchmarks and tests: real processes, started once per world size and reused for every job."""

import atexit
import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import time
import traceback
from multiprocessing.connection import wait

_context = multiprocessing.get_context("forkserver")
# Imported once and forked, not once per rank: torch's optimizers import its compiler, which takes seconds.
_context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo"])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _serve(pipe) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all of a terminal's processes; the first answers it
    import torch
    from tqdm import tqdm

    # For the levels' bars: by default a semaphore, which a killed process leaves behind.
    tqdm.set_lock(threading.RLock())
    torch.set_num_threads(1)
    while True:
        job = pipe.recv()
        if job is None:
            return
        function, args, kwargs, environment = job
        before = dict(os.environ)
        os.environ.update(environment)
        try:
            pipe.send((True, function(*args, **kwargs)))
        except BaseException as error:
            pipe.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
        finally:
            os.environ.clear()
            os.environ.update(before)


class RankFailed(AssertionError):
    """A rank raised; the message holds the traceback of every rank that did."""


class Ranks:
    """`world_size` processes on this machine that run one job after another.

    Each job sees the environment that torchrun would give it (RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE,
    MASTER_ADDR and a fresh MASTER_PORT); whether it builds a process group, and tears it down, is the job's affair.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._workers: list = []

    def _start(self) -> None:
        for _ in range(self.world_size):
            ours, theirs = _context.Pipe()
            process = _context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def run(self, function, *args, timeout: float = 120, environment: dict[str, str] | None = None, **kwargs) -> list:
        """Call `function(*args, **kwargs)` on every rank and return the results in rank order.

        `function` and what it takes and returns must be picklable. RankFailed is raised if any rank raises or is
        silent for `timeout` seconds; the processes are then thrown away, so that the next job starts clean.
        """
        if not self._workers:
            self._start()
        port = free_port()
        for rank, (_, pipe) in enumerate(self._workers):
            ranked = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.world_size),
                "LOCAL_WORLD_SIZE": str(self.world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            pipe.send((function, args, kwargs, ranked | (environment or {})))
        results, failures = self._answers(timeout)
        if failures:
            self.stop()
            raise RankFailed("\n".join(failure for _, failure in sorted(failures.items())))
        return [results[rank] for rank in range(self.world_size)]

    def _answers(self, timeout: float) -> tuple[dict, dict[int, str]]:
        """By rank what each returned, and why others did not, in the order in which they answer."""
        results, failures = {}, {}
        waiting = {pipe: (rank, process) for rank, (process, pipe) in enumerate(self._workers)}
        deadline = time.monotonic() + timeout
        while waiting:
            # After one failure the others may wait for the dead rank for ever: grant them a moment only.
            ready = wait(list(waiting), 2 if failures else max(0, deadline - time.monotonic()))
            if not ready:
                for rank, process in waiting.values():
                    failures[rank] = f"rank {rank}: no answer ({'alive' if process.is_alive() else 'dead'})"
                break
            for pipe in ready:
                rank, process = waiting.pop(pipe)
                try:
                    succeeded, value = pipe.recv()
                except (EOFError, ConnectionError):
                    process.join(5)
                    succeeded, value = False, f"the process ended with exit code {process.exitcode}"
                if succeeded:
                    results[rank] = value
                else:
                    failures[rank] = f"rank {rank}: {value}"
        return results, failures

    def stop(self, patience: float = 0) -> None:
        """End the processes, at once or after as many seconds each in which to end by themselves."""
        for process, pipe in self._workers:
            if patience and process.is_alive():
                with contextlib.suppress(OSError):
                    pipe.send(None)
        for process, pipe in self._workers:
            process.join(patience)
            process.kill()
            process.join()
            pipe.close()
        self._workers = []


_pools: dict[int, Ranks] = {}


def ranks(world_size: int) -> Ranks:
    """The one pool of `world_size` processes of this program."""
    return _pools.setdefault(world_size, Ranks(world_size))


@atexit.register
def _stop_all() -> None:
    for pool in _pools.values():
        pool.stop(patience=5)
