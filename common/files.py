"""Files that are whole or not there, whenever the process that writes them is killed.

The content is first written to a draft, a file with another name in the same folder. Then the draft is renamed, which
the system does in one step.
"""

import contextlib
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path


def nearest_existing(path: Path) -> Path:
    """`path`, or the nearest of its parents that exists."""
    return next(folder for folder in (path, *path.parents) if os.path.exists(folder))


def can_be_written(path: Path) -> bool:
    """True if `atomic_write` can write the file `path` now."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return not path.is_dir() and os.access(path, os.W_OK)
    except FileNotFoundError:
        pass  # It will be a regular file.
    except OSError:  # For example the name is too long, or a folder on the way cannot be entered.
        return False
    return os.access(os.path.dirname(os.path.realpath(path)), os.W_OK)  # atomic_write follows links.


def write_atomically(path: str | os.PathLike, content: str | bytes) -> None:
    """Write `content` to the file `path`, a text in UTF-8. See `atomic_write`.

    Raises OSError if it cannot be written; what was there before is then untouched.
    """
    if isinstance(content, str):
        content = content.encode()
    with atomic_write(path) as draft:
        draft.write_bytes(content)


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike) -> Iterator[Path]:
    """Yield the path of a draft, which replaces `path` when the block ends, and is removed if the block raises.

    A reader finds the old content or the new one, never a part, even after a crash of the machine. As with `open`, an
    existing file keeps its permissions, and a symbolic link is followed. A path that is no regular file, such as a pipe
    or /dev/null, cannot be replaced, so the block writes to it directly. A killed process leaves its draft behind.

    Raises OSError if the draft cannot be put in its place.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        yield Path(path)
        return
    target = Path(os.path.realpath(path))
    draft = target.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        yield draft
        if target.exists():
            shutil.copymode(target, draft)
        with draft.open("rb+") as file:  # Windows syncs only what is open for writing.
            os.fsync(file.fileno())  # waits until the content would survive a power failure
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)
