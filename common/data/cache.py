"""A folder of the user's for what can be made again, and a lock that lets processes into it one by one."""

import contextlib
import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock

from common.errors import fail


def cache_dir() -> Path:
    """A folder of the user's that can be written to, whatever becomes of `--data-dir`."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    # All users of a Unix share one folder for temporary files; on Windows, which has no getuid, each has his own.
    user = f"-{os.getuid()}" if hasattr(os, "getuid") else ""
    temporary = Path(tempfile.gettempdir()) / f"parallelism-ladder{user}"
    folders = [temporary]
    if base.is_absolute():  # "~/.cache" stays as it is for a user without a home
        folders.insert(0, base / "parallelism-ladder")
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return folder
    fail(f"neither {base} nor the folder for temporary files can be written to; set XDG_CACHE_HOME")


class FailureNote:
    """A file that says what the process before us, holding the same lock in the same job, could not do."""

    def __init__(self, path: Path, job: str) -> None:
        self._path = path
        self._job = job

    def read(self) -> str | None:
        """The reason of the failure that another process of this job has noted, or None."""
        try:
            text = self._path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        job, _, failure = text.partition("\n")
        return failure if job == self._job and failure else None

    def write(self, reason: str | None) -> None:
        """Note the reason of a failure for the other processes of this job; None if there was none."""
        self._path.write_text(f"{self._job}\n{reason or ''}", encoding="utf-8")


@contextlib.contextmanager
def one_process_at_a_time(purpose: str, resource: str) -> Iterator[FailureNote]:
    """Let the processes of this machine through one by one, so that only the first has to download or generate.

    The lock ends with the process that holds it, however that ends, and loader workers do not inherit it. A failure is
    noted for the other ranks of the job: they neither repeat the attempt nor decide otherwise.
    """
    subject = f"{purpose}:{Path(resource).resolve()}"
    key = hashlib.sha256(subject.encode()).hexdigest()[:16]
    folder = cache_dir()
    with FileLock(folder / f"{key}.lock"):
        yield FailureNote(folder / f"{key}.note", _job())


def _job() -> str:
    """A text that the ranks of one launch on this machine have in common, and nobody else has.

    Another launch may have the same port, but another process has started its ranks.
    """
    port = os.environ.get("MASTER_PORT")
    if port:
        return f"{os.environ.get('TORCHELASTIC_RUN_ID')}:{port}:{os.getppid()}"
    return f"{os.getpid()}:{time.monotonic_ns()}"
