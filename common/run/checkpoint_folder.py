"""The folder of a run's checkpoints: one job at a time saves into it, and an error about it is one line."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from common.accelerator.checkpointing import CheckpointError, RemoteError, file_names_of, has_checkpoints
from common.errors import fail
from common.process_group import broadcast_object, get_rank


@contextlib.contextmanager
def checkpoint_lock(folder: Path) -> Iterator[None]:
    """Within the block `folder` belongs to this job alone. A collective: all processes must enter it.

    Rank 0 holds the lock, which ends with its process, however that ends. Loader workers may outlive a killed rank,
    but they do not inherit it.

    Raises:
        UserError: on every rank, if another job of this machine has the folder, or if it cannot be written to.
    """
    lock = FileLock(folder / ".lock")
    problem = _acquire(lock, folder) if get_rank() == 0 else None
    problem = broadcast_object(problem)
    if problem:
        fail(problem)
    try:
        yield
    finally:
        lock.release()  # does nothing on the other ranks


def _acquire(lock: FileLock, folder: Path) -> str | None:
    """Take the lock; returns what is in the way, or None."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
    except Timeout:
        return f"another job is saving to {folder}: wait for it, or name another --checkpoint-dir"
    except OSError as error:
        return f"--checkpoint-dir cannot be written to: {error}"
    return None


@contextlib.contextmanager
def file_errors_in_one_line(folder: Path) -> Iterator[None]:
    """Within the block a full disk, a damaged checkpoint and the like end this process in one line.

    These are the errors of type CheckpointError, and OSErrors about a path in `folder`, on this rank or on another one.
    All other errors are mistakes in a program and keep their traceback: the other ranks show that of the RemoteError
    which quotes the mistake.

    Raises:
        UserError: in place of such an error.
    """
    try:
        yield
    except CheckpointError as error:
        fail(_with_folder(error, folder))
    except (OSError, RemoteError) as error:
        if not _is_about(error, folder):
            raise
        fail(_with_folder(error, folder))


def _is_about(error: OSError | RemoteError, folder: Path) -> bool:
    """Whether the error names the folder, or something in it."""
    return any(Path(name).is_relative_to(folder) for name in file_names_of(error))


def _with_folder(error: Exception, folder: Path) -> str:
    text = str(error)
    return text if str(folder) in text else f"{folder}: {text}"


def rank_0_finds_checkpoint(folder: Path, prefix: str) -> bool:
    """Whether rank 0 finds a checkpoint, whole or damaged, in `folder`. A collective: all processes must call it.

    Rank 0 decides for all: a process on another machine may not see its disk, and a rank that begins anew beside one
    that resumes would leave it waiting.

    Args:
        prefix: what stands before the number in a checkpoint's name, for example "checkpoint_". Folders that were set
            aside as damaged have another name.
    """
    return broadcast_object(has_checkpoints(folder, prefix))
