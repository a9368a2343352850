"""The folder of a run's checkpoints: one job at a time saves into it, and what is wrong with it is one line."""

import fcntl
import sys
import traceback
from pathlib import Path

import torch.distributed as dist

from common.errors import fail


def claim(folder: str, rank: int, distributed: bool):
    """Make `folder` this job's until rank 0 ends or closes what it is returned; None on the other ranks. A collective.

    UserError on every rank if another job of this machine has it, or if it cannot be written to.
    """
    lock, problem = None, None
    if rank == 0:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            lock = Path(folder, ".lock").open("w")  # noqa: SIM115
            # Unlike flock's, this lock is not inherited by loader workers, which may outlive a killed rank.
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            problem = f"another job is saving to {folder}: wait for it, or name another --checkpoint-dir"
        except OSError as error:
            problem = f"--checkpoint-dir cannot be written to: {error}"
    if distributed:
        said = [problem]
        dist.broadcast_object_list(said)
        problem = said[0]
    if problem:
        fail(problem)
    return lock


def explain_errors(folder: str) -> None:
    """From now on a full disk, a damaged checkpoint and the like end this process in one line, not in a traceback.

    For errors that nobody catches while the core saves or loads in `folder`. All others keep their traceback.
    """
    from common.accelerator import checkpointing

    uncaught = sys.excepthook

    def explain(kind, error, trace) -> None:
        files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace)]
        if checkpointing.__file__ in files:
            # Where one process failed, the others quote it: in this file, and not in a collective that broke.
            quoted = isinstance(error, RuntimeError) and files[-1] == checkpointing.__file__
            if quoted or isinstance(error, (OSError, checkpointing.CheckpointError)):
                fail(str(error) if folder in str(error) else f"{folder}: {error}")
        uncaught(kind, error, trace)

    sys.excepthook = explain
