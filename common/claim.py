"""A folder into which one job at a time may save: what a second one would do to the first one's checkpoints."""

import fcntl
from pathlib import Path

import torch.distributed as dist

from common.errors import fail


def claim(folder: str, rank: int):
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
    if dist.is_available() and dist.is_initialized():
        said = [problem]
        dist.broadcast_object_list(said)
        problem = said[0]
    if problem:
        fail(problem)
    return lock
