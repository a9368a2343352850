"""The checkpoints of a run, side by side in one folder: the newest that is whole, and the old ones that make room."""

import contextlib
import glob
import logging
import re
import uuid
from pathlib import Path

from .checkpoint_folder import finish_or_warn, remove
from .checkpoint_manifest import MANIFEST_NAME, CheckpointError, verify

logger = logging.getLogger(__name__)


def numbered(parent: Path, prefix: str = "checkpoint_") -> list[Path]:
    """The folders in `parent` whose names are `prefix` and a number, the highest number first; no links."""
    if not parent.is_dir():
        return []
    pattern = re.compile(re.escape(prefix) + "[0-9]+")
    found = [path for path in parent.iterdir() if pattern.fullmatch(path.name)]
    folders = [path for path in found if path.is_dir() and not path.is_symlink()]
    return sorted(folders, key=lambda path: int(path.name.removeprefix(prefix)), reverse=True)


def recover_newest(parent: Path, prefix: str = "checkpoint_") -> Path:
    """The newest checkpoint in `parent` that is complete and undamaged, after clearing up what killed saves have left.

    Interrupted saves are finished. Each damaged checkpoint that is newer is logged and renamed, because the run will
    need its number again. Drafts, and parts beside the folders, are then removed. No process may be saving meanwhile.

    Raises:
        CheckpointError: if no checkpoint is complete and undamaged; then nothing is renamed or removed.
    """
    folders = numbered(parent, prefix)
    for folder in folders:
        finish_or_warn(folder)
    damaged: dict[Path, str] = {}
    for folder in folders:
        try:
            verify(folder)
        except CheckpointError as error:
            damaged[folder] = str(error)
        else:
            _clear_up(parent, prefix, damaged)
            logger.info("resuming from %s", folder)
            return folder
    raise CheckpointError("; ".join([f"there is no complete and undamaged checkpoint in {parent}", *damaged.values()]))


def _clear_up(parent: Path, prefix: str, damaged: dict[Path, str]) -> None:
    """Rename the damaged checkpoints, and remove drafts and parts. Where nobody may write, all of this stays."""
    for path, error_text in damaged.items():
        logger.warning("skipping a checkpoint: %s", error_text)
        with contextlib.suppress(OSError):
            path.rename(f"{path}.damaged-{uuid.uuid4().hex[:8]}")
    leftovers: list[Path] = []
    for kind in ("draft_*", "part_*", "removed"):
        leftovers += parent.glob(f".{glob.escape(prefix)}*.{kind}")
    for folder in numbered(parent, prefix):
        leftovers += folder.glob(".draft_*")
    for path in leftovers:
        with contextlib.suppress(OSError):
            remove(path)


def remove_old_checkpoints(just_written: Path, limit: int) -> None:
    """Remove checkpoints beside `just_written` until at most `limit`, and at least that one, are left.

    Those with higher numbers than `just_written` are from an earlier run, so they count as older than those with lower
    numbers.
    """
    highest_first = [path for path in numbered(just_written.parent) if (path / MANIFEST_NAME).exists()]
    place = highest_first.index(just_written)
    newest_first = highest_first[place:] + highest_first[:place]
    for old in newest_first[max(limit, 1) :]:
        remove_folder(old)


def remove_folder(folder: Path) -> None:
    """Remove `folder`. It is renamed first, so that a kill leaves no half of it under its name."""
    removed = folder.with_name(f".{folder.name}.removed")
    remove(removed)
    folder.rename(removed)
    remove(removed)
