"""Files that are whole or not there, whenever the process that writes them is killed.

What is being written bears another name, beside the place where it is to be. Renaming it is the one moment in which
the new content comes to be.
"""

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path


def nearest_existing(path: Path) -> Path:
    """The first of `path` and its parents that is there: where a new folder would have to be made."""
    return next(folder for folder in (path, *path.parents) if os.path.exists(folder))


def write_atomically(path: str | os.PathLike, content: str | bytes) -> None:
    """Make `content` the content of the file `path`; texts are written in UTF-8. See `atomic_write`.

    Raises:
        OSError: if it cannot be written; what was there before is then untouched.
    """
    if isinstance(content, str):
        content = content.encode()
    with atomic_write(path) as draft:
        draft.write_bytes(content)


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike) -> Iterator[Path]:
    """Yield the path of a draft, which becomes `path` when the block ends; if the block raises, the draft goes.

    A reader meets the old content or the new one, never a part, also after a crash of the machine. As with `open`, a
    file that was there keeps its permissions, and a symbolic link is followed. What is no regular file, for instance
    /dev/stdout, cannot be replaced: the block writes to it directly. A process that is killed leaves its draft behind.

    Raises:
        OSError: if the draft cannot be put in its place.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        yield target
        return
    draft = target.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        yield draft
        if target.exists():
            shutil.copymode(target, draft)
        sync_to_disk(draft)
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)


def sync_to_disk(path: Path) -> None:
    """Wait until the content of the file `path` would survive a power failure."""
    with path.open("rb+") as file:  # Windows syncs only what is open for writing.
        os.fsync(file.fileno())
