"""The processes on which pitfalls run: reused, and thrown away after a hang."""

import multiprocessing
import os
import signal
import tempfile
import traceback

SECONDS = 180  # the last resort, for one version of one pitfall
_context = multiprocessing.get_context("forkserver")
# Imported once and forked, not once per rank: torch's optimizers import its
# compiler, which takes seconds.
_PRELOAD = [
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "common.pitfalls.stage",
]


def _serve(pipe, rank: int, world_size: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its ranks
    for name in ("RANK", "LOCAL_RANK"):
        os.environ[name] = str(rank)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ[name] = str(world_size)
    # The core wants the environment complete, though the group meets in a file.
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    import torch

    from common.pitfalls.stage import play

    torch.set_num_threads(1)
    while True:
        try:
            job = pipe.recv()
        except EOFError:  # the parent is gone
            return
        try:
            pipe.send((play(*job, rank, world_size), None))
        except BaseException:
            pipe.send((None, traceback.format_exc()))


class Ranks:
    """Processes for each world size; leaving the `with` block ends them all."""

    def __init__(self) -> None:
        self._pools: dict[int, list] = {}

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *exception) -> None:
        for world_size in list(self._pools):
            self._stop(world_size)

    def play(self, module: str, version: str, world_size: int) -> list:
        """Every rank's Report on the "wrong" or "right" version of a pitfall.

        Raises:
            RuntimeError: with the traceback of every rank that raised or did
                not answer; the next call starts new processes.
        """
        if world_size not in self._pools:
            self._pools[world_size] = self._start(world_size)
        pool = self._pools[world_size]
        with tempfile.TemporaryDirectory(prefix="pitfall-") as folder:
            for _, pipe in pool:
                pipe.send((module, version, folder))
            reports, failures = [], []
            for rank, (process, pipe) in enumerate(pool):
                # After a failure others may wait for that rank for ever.
                report, failure = _answer(
                    process, pipe, 5 if failures else SECONDS
                )
                reports.append(report)
                failures += (
                    [f"{version} on rank {rank}: {failure}"] if failure else []
                )
        if failures or any(report.hung for report in reports):
            self._stop(world_size)
        if failures:
            raise RuntimeError(f"{module} has failed\n" + "\n".join(failures))
        return reports

    def _start(self, world_size: int) -> list:
        _context.set_forkserver_preload(_PRELOAD)
        pool = []
        for rank in range(world_size):
            ours, theirs = _context.Pipe()
            arguments = (theirs, rank, world_size)
            process = _context.Process(
                target=_serve, args=arguments, daemon=True
            )
            process.start()
            theirs.close()
            pool.append((process, ours))
        return pool

    def _stop(self, world_size: int) -> None:
        for process, pipe in self._pools.pop(world_size):
            process.kill()
            process.join()
            pipe.close()


def _answer(process, pipe, seconds: float) -> tuple:
    """A rank's report, or None and what has become of the rank."""
    if not pipe.poll(seconds):
        return None, f"no answer within {seconds} s"
    try:
        return pipe.recv()
    except EOFError:
        process.join()
        return None, f"the process has ended with exit code {process.exitcode}"
