"""The folders of checkpoints: written, found and removed so that a kill at any moment loses no complete checkpoint.

checkpointing.py shows the four steps of a save to the folder `c`. They are safe for these reasons:

- A rename is atomic. So `.c.part_1` and `c` have all of their files or do not exist.
- A part is *complete* when its manifest, the list of its files, is in its place. The manifest is always written and
  moved last. A checkpoint is *complete* when its main part is. Rank parts may come later, or never.
- If `c` exists already, with an older checkpoint or files of the user, step 3 renames `.c.staging_0` to `c/.new`
  instead. At this moment the new checkpoint begins to exist. Then the files of `c/.new` are moved to their places.
- Step 4 is done by the rank that comes last, whichever it is. If two ranks come at once, each file is renamed once.

With `save_on_each_node` the first process of each machine writes a main part, to its own disk. Nobody waits for the
disk: after a power failure the newest checkpoint may be damaged. Loading finds this out, and without a name it takes
the one before.

A folder may come from a stranger. So files are opened or moved only if they were found by walking through the folder,
which follows no symbolic link. A manifest only says which of these files belong to the checkpoint.
"""

import contextlib
import glob
import logging
import os
import re
import shutil
import uuid
from collections.abc import Collection, Iterable
from pathlib import Path

from ..state import PartialState
from .checkpoint_manifest import (
    MANIFEST_NAME,
    RANK_MANIFEST_NAME,
    CheckpointError,
    PartManifest,
    describe_files,
    files_in,
    is_manifest,
    read_part_manifest,
    verify,
    write_part_manifest,
)

logger = logging.getLogger(__name__)

NEW_NAME = ".new"


# Write: steps 1 to 3


class Part:
    """The part of a checkpoint that this process writes.

    Args:
        folder: the folder of the checkpoint.
        save_id: the id of the save, which is the same on all ranks.
        is_main: True for the main part.

    Attributes:
        staging: the folder in which the part is written.
        pending: the folder in which a complete rank part waits for the main part.
    """

    def __init__(self, folder: Path, save_id: str, is_main: bool) -> None:
        state = PartialState()
        self.folder = folder
        self.save_id = save_id
        self.is_main = is_main
        self.rank = state.process_index
        self.world_size = state.num_processes
        self.staging = _hidden_path(folder, f"staging_{self.rank}")
        self.pending = _hidden_path(folder, f"part_{self.rank}")

    def stage(self) -> None:
        """Make an empty staging folder, after finishing an earlier save that was interrupted."""
        if self.is_main:
            finish_interrupted_save(self.folder)
        remove(self.staging)
        remove(self.pending)
        self.staging.mkdir(parents=True)

    def publish(self) -> None:
        """Complete this part, and merge what belongs together. Files in the folder that are no part of it stay.

        Raises:
            CheckpointError: if the staging folder holds a symbolic link, or a folder or a link is where a file of the
                main part is to be. Then nothing is changed.
        """
        name = MANIFEST_NAME if self.is_main else RANK_MANIFEST_NAME.format(self.rank)
        manifest = PartManifest(self.save_id, self.rank, self.world_size, describe_files(self.staging))
        write_part_manifest(manifest, self.staging / name)
        if not self.is_main:
            self.staging.rename(self.pending)
        elif not self.folder.exists():
            self.staging.rename(self.folder)
        else:
            _require_places_for(files_in(self.staging), self.folder)
            new = self.folder / NEW_NAME
            self.staging.rename(new)
            _move_files(new, self.folder)
        _merge_pending_parts(self.folder)

    def discard(self) -> None:
        """Remove what has been staged, because the save has failed."""
        remove(self.staging)


def _hidden_path(folder: Path, name: str) -> Path:
    """A hidden path beside `folder`, so that it can be renamed to `folder`.

    If `folder` is a mount point, or its parent is read-only, nothing can be renamed to it. Then the path is inside.
    """
    if folder.exists() and (os.path.ismount(folder) or not os.access(folder.parent, os.W_OK)):
        return folder / f".{name}"
    return folder.with_name(f".{folder.name}.{name}")


def remove(path: Path) -> None:
    """Remove a file, a link or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# Finish: the rest of step 3, and step 4


def finish_interrupted_save(folder: Path) -> None:
    """Move the files of all complete parts of the checkpoint in `folder` to their places.

    If they cannot be moved, as on a read-only disk, a warning says so, and the checkpoint is loaded as it is.

    Raises:
        CheckpointError: if no save can have left what is there; then nothing is touched.
    """
    new = folder / NEW_NAME
    if new.is_symlink() or new.is_file():
        raise CheckpointError(f"{new} is no folder")
    try:
        if new.is_dir():
            _move_files(new, folder)
        _merge_pending_parts(folder)
    except OSError as error:
        logger.warning("%s: an interrupted save cannot be finished: %s", folder, error)


def _merge_pending_parts(folder: Path) -> None:
    """Move the rank parts that wait for the main part in `folder` to their places. A file of the main part stays."""
    try:
        main = read_part_manifest(folder / MANIFEST_NAME)
    except CheckpointError:
        return
    for part in _pending_parts(folder, main.save):
        # Two ranks may move the same part. The one that finds a file gone leaves the rest to the other.
        with contextlib.suppress(FileNotFoundError):
            _move_files(part, folder, unless_in=main.files)


def _pending_parts(folder: Path, save_id: str) -> list[Path]:
    """The complete rank parts of a save that are not in its folder yet."""
    without_rank = _hidden_path(folder, "part_")
    found = []
    for path in without_rank.parent.glob(f"{glob.escape(without_rank.name)}*"):
        name = RANK_MANIFEST_NAME.format(path.name.removeprefix(without_rank.name))
        # It may be no part, or another rank may have moved it just now.
        with contextlib.suppress(CheckpointError, FileNotFoundError):
            part = read_part_manifest(path / name)
            if part.save == save_id and not path.is_symlink():
                found.append(path)
    return found


def _move_files(source: Path, folder: Path, unless_in: Collection[str] = ()) -> None:
    """Move the files of `source` to their places in `folder`, but those named in `unless_in`, and remove `source`."""
    files = files_in(source)
    _require_places_for(files, folder)
    for name in sorted(files, key=is_manifest):  # so the manifest comes last
        if name not in unless_in:
            place = folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(files[name], place)
    shutil.rmtree(source)


def _require_places_for(names: Iterable[str], folder: Path) -> None:
    """Raise a CheckpointError if there is a folder or a link where one of these files is to be in `folder`."""
    for name in names:
        place = folder / name
        if place.is_dir() or place.parent.resolve() != folder.resolve() / Path(name).parent:
            raise CheckpointError(f"{place} is a folder or behind a link, where a file is to be")


# Find


def numbered(parent: Path, prefix: str = "checkpoint_") -> list[Path]:
    """The folders in `parent` whose names are `prefix` and a number, the highest number first; no links."""
    if not parent.is_dir():
        return []
    pattern = re.compile(re.escape(prefix) + "[0-9]+")
    found = [path for path in parent.iterdir() if pattern.fullmatch(path.name)]
    folders = [path for path in found if path.is_dir() and not path.is_symlink()]
    return sorted(folders, key=lambda path: int(path.name.removeprefix(prefix)), reverse=True)


def recover_newest(parent: Path, prefix: str = "checkpoint_") -> Path:
    """Make the newest checkpoint in `parent` that is complete and undamaged the newest of all, and return it.

    Interrupted saves are finished first. Each damaged checkpoint that is newer is logged and renamed, because the run
    will need its number again. What else killed processes have left is removed. No process may be saving meanwhile.

    Raises:
        CheckpointError: if no checkpoint is complete and undamaged; then all stay as they are.
    """
    damaged = []
    for folder in numbered(parent, prefix):
        try:
            finish_and_verify(folder)
        except CheckpointError as error:
            logger.warning("skipping a checkpoint: %s", error)
            damaged.append(folder)
        else:
            logger.info("resuming from %s", folder)
            _clear_away(parent, prefix, damaged)
            return folder
    raise CheckpointError(f"there is no complete and undamaged checkpoint in {parent}")


def _clear_away(parent: Path, prefix: str, damaged: list[Path]) -> None:
    """Rename damaged checkpoints, and remove what killed processes have left of a save or of `remove_folder`.

    Where nobody may write, all of it stays: the run can go on from there nevertheless.
    """
    for folder in damaged:
        with contextlib.suppress(OSError):
            folder.rename(f"{folder}.damaged-{uuid.uuid4().hex[:8]}")
    hidden = f".{glob.escape(prefix)}*"
    left_over = [*parent.glob(f"{hidden}.staging_*"), *parent.glob(f"{hidden}.removed")]
    for folder in numbered(parent, prefix):
        left_over += folder.glob(".staging_*")
    for part in parent.glob(f"{hidden}.part_*"):
        checkpoint = part.name.split(".")[1]
        # If its checkpoint exists, the part may belong to it, and loading that moves it there.
        if not (parent / checkpoint).exists():
            left_over.append(part)
    for path in left_over:
        with contextlib.suppress(OSError):
            remove(path)


def finish_and_verify(folder: Path) -> None:
    """Finish a save that was interrupted, and verify the checkpoint. What is wrong with it is a CheckpointError."""
    finish_interrupted_save(folder)
    verify(folder)


# Rotate


def remove_old_checkpoints(just_written: Path, limit: int) -> None:
    """Remove checkpoints beside `just_written` until at most `limit`, and at least that one, are left.

    Those with higher numbers than `just_written` are from an earlier run, so they count as older than those with lower
    numbers.

    Raises:
        OSError: if one cannot be removed.
    """
    highest_first = [path for path in numbered(just_written.parent) if (path / MANIFEST_NAME).exists()]
    place = highest_first.index(just_written)
    newest_first = highest_first[place:] + highest_first[:place]
    for old in newest_first[max(limit, 1) :]:
        remove_folder(old)


def remove_folder(folder: Path) -> None:
    """Remove `folder`. It is renamed first, so that a kill leaves no half of it under its name.

    Raises:
        OSError: if it cannot be renamed or removed.
    """
    removed = folder.with_name(f".{folder.name}.removed")
    remove(removed)
    folder.rename(removed)
    remove(removed)
