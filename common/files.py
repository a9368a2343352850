"""Files and folders that are whole or not there, whenever the process that writes them is killed.

What is being written bears a draft's name, beside the place where it is to be: `.<random>@<process>@<host>.tmp`.
Renaming it is the one moment in which the new content comes to be. The name says whose draft it is, so that what a
killed process left can be removed, and what a living one is building cannot.
"""

import contextlib
import os
import re
import shutil
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path

DRAFT_SUFFIX = ".tmp"
_DRAFT_NAME = re.compile(r"\.[^@]+@(?P<process>[0-9]{1,10})@(?P<host>.+)\.tmp", re.DOTALL)

# An earlier process of this machine may have had the same number (in containers it often has), so the number alone
# does not say that a draft is this process's own.
_drafts_of_this_process: set[str] = set()


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
    /dev/stdout, cannot be replaced: the block writes to it directly.

    Raises:
        OSError: if the draft cannot be put in its place.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        yield target
        return
    draft = new_draft(target.parent)
    try:
        yield draft
        if target.exists():
            shutil.copymode(target, draft)
        sync_to_disk(draft)
        os.replace(draft, target)
        sync_to_disk(target.parent)
    finally:
        discard_draft(draft)


def new_draft(folder: Path) -> Path:
    """A free name in `folder` for a file or a folder in the making, after drafts of dead processes are removed."""
    remove_abandoned_drafts(folder)
    name = f".{uuid.uuid4().hex}@{os.getpid()}@{socket.gethostname()}{DRAFT_SUFFIX}"
    _drafts_of_this_process.add(name)
    return folder / name


def discard_draft(draft: Path) -> None:
    """Remove what is left of `draft`, a file or a folder, if anything is. What cannot be removed stays."""
    _remove_file_or_folder(draft)
    forget_draft(draft)


def forget_draft(draft: Path) -> None:
    """Forget that `draft` is this process's own, when it has been renamed or removed."""
    _drafts_of_this_process.discard(draft.name)


def remove_abandoned_drafts(folder: Path) -> None:
    """Remove what dead processes of this machine were writing in `folder`, which need not exist.

    What belongs to a living process, or to another machine, may be the work of another job and stays.
    """
    with contextlib.suppress(OSError):
        for path in list(folder.iterdir()):
            if _is_abandoned(path):
                _remove_file_or_folder(path)


def _is_abandoned(path: Path) -> bool:
    name = _DRAFT_NAME.fullmatch(path.name)
    if name is None or name["host"] != socket.gethostname() or path.name in _drafts_of_this_process:
        return False
    process = int(name["process"])
    return process == os.getpid() or not process_is_alive(process)


def _remove_file_or_folder(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        path.unlink()


def process_is_alive(process: int) -> bool:
    """Does a process of this number run on this machine? True also where the system cannot be asked."""
    if os.name == "nt":  # where os.kill ends the process, whatever the signal
        return True
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):  # the latter for a number that no process has
        return False
    except OSError:  # it runs, and belongs to somebody else
        return True
    return True


def replace_folder(draft: Path, folder: Path) -> None:
    """Make the folder `draft` appear as `folder`, in place of what is there. Both have the same parent.

    Raises:
        OSError: if it cannot be renamed; what was there before then bears its name again.
    """
    replaced = new_draft(folder.parent)
    with contextlib.suppress(FileNotFoundError):
        os.rename(folder, replaced)
    try:
        os.rename(draft, folder)
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            os.rename(replaced, folder)
        raise
    finally:
        discard_draft(replaced)
    forget_draft(draft)
    sync_to_disk(folder.parent)


def remove_folder(folder: Path) -> None:
    """Remove `folder`, if it is there. It gives up its name first: half a folder never bears the name of a whole one.

    Raises:
        OSError: if it cannot be renamed.
    """
    doomed = new_draft(folder.parent)
    with contextlib.suppress(FileNotFoundError):
        os.rename(folder, doomed)
    discard_draft(doomed)


def sync_to_disk(path: Path) -> None:
    """Wait until the content of the file `path`, or the names in the folder `path`, would survive a power failure."""
    if os.name == "nt" and path.is_dir():  # Windows opens no folders
        return
    # Windows syncs only what is open for writing; elsewhere a read-only file can be synced too.
    handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
