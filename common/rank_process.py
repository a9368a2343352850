"""The process of one rank: it calls the functions that `common.processes` sends it, one after another."""

import gc
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch

from common.allocator import keep_large_blocks
from common.cores import use_all_cores
from common.errors import UserError
from common.hidden_gpus import hide_gpus


class Job(NamedTuple):
    function: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]
    environment: dict[str, str]


class Returned(NamedTuple):
    """The answer of a rank on which the function has returned."""

    result: Any


class Failed(NamedTuple):
    """The answer of a rank on which the function has raised, or whose process has ended."""

    reason: str  # An exception need not be picklable.
    process_ended: bool = False


def serve(pipe: Connection, on_cpu: bool) -> None:
    """The main loop of a rank: run one job after another, until it is killed or the parent has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Windows cannot block it, and child processes inherit this.
    # A daemon may not start processes, but a job may have loader workers. Our parent still ends us as a daemon.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    keep_large_blocks()  # The levels call it too, but a job may have made tensors before.
    if on_cpu:
        hide_gpus()
    from tqdm import tqdm

    # The lock of the levels' bars would be a semaphore, which a killed process leaves behind.
    tqdm.set_lock(threading.RLock())
    while True:
        torch.set_num_threads(1)  # A job before this one may have set more.
        try:
            job = pipe.recv()
        except EOFError:  # The parent has ended.
            return
        _run(job, pipe)


def _run(job: Job, pipe: Connection) -> None:
    before = dict(os.environ)
    os.environ.update(job.environment)
    try:
        answer = ForkingPickler.dumps(Returned(job.function(*job.args, **job.kwargs)))  # as `pipe.send` would
    except UserError as error:
        answer = ForkingPickler.dumps(Failed(str(error)))  # It is one line that says what to correct.
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        answer = ForkingPickler.dumps(Failed(reason))
    finally:
        if torch.cuda.is_initialized():
            # The next job may be measured on the same GPU, by this process or by another.
            gc.collect()
            torch.cuda.empty_cache()
        use_all_cores()  # The job may have confined this process to a device.
        os.environ.clear()
        os.environ.update(before)
    pipe.send_bytes(answer)
