"""The files of a checkpoint: saved, found, loaded and rotated so that a kill at any moment loses no whole checkpoint.

No process waits for another. Each one that saves writes a **part**. The main process writes the *main part*, which has
what all ranks share: weights, optimizers and so on. Every other rank writes a *rank part*, with its random states and
gradients. With `save_on_each_node`, the first process of each machine writes a main part. Each part has a **manifest**,
the list of its files, which is written last: a part with its manifest is **finished**. A checkpoint is **whole** if its
main part is finished. The rank parts are added when they come, or are never there if the main process saves alone.

The life of a save to the folder `c` on ranks 0 and 1, as file operations:

1. Stage. Each rank makes an empty staging folder beside `c`, `.c.staging_0` or `.c.staging_1`, and writes its files
   and then its manifest there.
2. Publish a rank part. Rank 1 renames `.c.staging_1` to `.c.part_1`. The part waits there for the main part.
3. Publish the main part. Rank 0 renames `.c.staging_0` to `c`. At this moment the checkpoint begins to exist.
   If `c` exists already, with an older checkpoint or files of the user, there are two steps instead:
   a. Rename `.c.staging_0` to `c/.new`. At this moment the new checkpoint begins to exist.
   b. Move the files of `c/.new` to their places in `c`, the manifest last.
4. Merge. Rank 0 or rank 1, whichever comes last, moves the files of `.c.part_1` into `c`, the manifest last. If both
   come at once, they move the same files. Each file is renamed once, so the rank that finds a file gone leaves the rest
   of the part to the other.

By default the ranks go through these steps each at its own pace. So if rank 1 is killed before step 2 and rank 0 comes
to step 3, the checkpoint has no part of rank 1, and loading it says so. With `all_ranks=True` step 3 begins when all
ranks have done step 2, so the checkpoint has all parts or does not exist.

A rename is atomic, so each of these folders has all of its files or does not exist. A process that is killed in steps 1
or 2 leaves a staging folder, which is never read. One that is killed in steps 3 or 4 leaves finished parts, and the
next save or load moves them to their places (`finish_interrupted_save`). Nobody waits for the disk: after a power
failure the newest checkpoint may be damaged. Loading finds this out. Without a name it takes the one before.

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
from collections.abc import Collection
from pathlib import Path

from .checkpoint_manifest import (
    MANIFEST_NAME,
    RANK_MANIFEST_NAME,
    CheckpointError,
    files_in,
    read_part_manifest,
    verify,
    write_manifest,
)

logger = logging.getLogger(__name__)

NEW_NAME = ".new"


# Write: steps 1 to 3


class Part:
    """The part that one process writes in one save.

    Args:
        folder: the folder of the checkpoint.
        save_id: the id of the save, which is the same on all ranks.
        is_main: True for the main part.

    Attributes:
        staging: the folder in which the part is written.
        pending: the folder in which a finished rank part waits for the main part.
    """

    def __init__(self, folder: Path, save_id: str, rank: int, world_size: int, is_main: bool) -> None:
        self.folder = folder
        self.save_id = save_id
        self.rank = rank
        self.world_size = world_size
        self.is_main = is_main
        self.staging = _beside(folder, f"staging_{rank}")
        self.pending = _beside(folder, f"part_{rank}")

    def stage(self) -> None:
        """Make an empty staging folder, after finishing an earlier save that was interrupted."""
        if self.is_main:
            finish_interrupted_save(self.folder)
        remove(self.staging)
        remove(self.pending)
        self.staging.mkdir(parents=True)

    def publish(self) -> None:
        """Finish this part, and merge what belongs together. Files in the folder that are no part of it stay.

        Raises:
            CheckpointError: if a folder or a link is where a file of the main part is to be. Then nothing is changed.
        """
        name = MANIFEST_NAME if self.is_main else RANK_MANIFEST_NAME.format(self.rank)
        write_manifest(self.staging, name, self.save_id, self.rank, self.world_size)
        if not self.is_main:
            self.staging.rename(self.pending)
        elif not self.folder.exists():
            self.staging.rename(self.folder)
        else:
            new = self.folder / NEW_NAME
            _files_and_places(self.staging, self.folder)  # raises if something is in the way
            self.staging.rename(new)
            _move_files(new, self.folder)
        _merge_pending_parts(self.folder)


def _beside(folder: Path, name: str) -> Path:
    """A hidden path beside `folder`. It is inside of a mount point, or of a folder whose parent is read-only."""
    is_open_to_renames = os.access(folder.parent, os.W_OK) and not os.path.ismount(folder)
    if folder.exists() and not is_open_to_renames:
        return folder / f".{name}"
    return folder.with_name(f".{folder.name}.{name}")


def remove(path: Path) -> None:
    """Remove a file, a link or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# Finish: steps 3b and 4


def finish_interrupted_save(folder: Path) -> None:
    """Move the files of all finished parts of the checkpoint in `folder` to their places.

    Raises:
        CheckpointError: if no save can have left what is there; then nothing is touched.
    """
    new = folder / NEW_NAME
    if new.is_symlink() or new.is_file():
        raise CheckpointError(f"{new} is no folder")
    if new.is_dir():
        _move_files(new, folder)
    _merge_pending_parts(folder)


def _merge_pending_parts(folder: Path) -> None:
    """Move the rank parts that wait for the main part in `folder` to their places. A file of the main part stays."""
    try:
        main = read_part_manifest(folder / MANIFEST_NAME)
    except CheckpointError:
        return
    for part in _pending_parts(folder, main["save"]):
        with contextlib.suppress(FileNotFoundError):  # the other rank of step 4 was faster
            _move_files(part, folder, unless_in=main["files"])


def _pending_parts(folder: Path, save_id: str) -> list[Path]:
    """The finished rank parts of a save that are not in its folder yet."""
    pattern = _beside(folder, "part_")
    found = []
    for path in pattern.parent.glob(f"{glob.escape(pattern.name)}*"):
        name = RANK_MANIFEST_NAME.format(path.name.rpartition("_")[2])
        with contextlib.suppress(CheckpointError, OSError):  # no part, or the other rank of step 4 was faster
            part = read_part_manifest(path / name)
            if part["save"] == save_id and not path.is_symlink():
                found.append(path)
    return found


def _move_files(source: Path, folder: Path, unless_in: Collection[str] = ()) -> None:
    """Move the files of `source` to their places in `folder`, but those named in `unless_in`, and remove `source`."""
    for file, place in _files_and_places(source, folder):
        if file.relative_to(source).as_posix() not in unless_in:
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(file, place)
    shutil.rmtree(source)


def _files_and_places(source: Path, folder: Path) -> list[tuple[Path, Path]]:
    """Each file in `source` with its place in `folder`, the manifest last. An obstacle there is a CheckpointError."""
    files_and_places = []
    files = files_in(source)
    for name in sorted(files, key=_is_manifest):
        place = folder / name
        if place.is_dir() or place.parent.resolve() != folder.resolve() / Path(name).parent:
            raise CheckpointError(f"{place} is a folder or behind a link, where a file is to be")
        files_and_places.append((files[name], place))
    return files_and_places


def _is_manifest(name: str) -> bool:
    return re.fullmatch(r"manifest(_[0-9]+)?\.json", name) is not None


# Find


def numbered(parent: Path, prefix: str = "checkpoint_") -> list[Path]:
    """The folders in `parent` whose names are `prefix` and a number, the highest number first; no links."""
    if not parent.is_dir():
        return []
    pattern = re.compile(re.escape(prefix) + "[0-9]+")
    found = [path for path in parent.iterdir() if pattern.fullmatch(path.name)]
    folders = [path for path in found if path.is_dir() and not path.is_symlink()]
    return sorted(folders, key=lambda path: int(path.name.removeprefix(prefix)), reverse=True)


def choose_newest(parent: Path, prefix: str = "checkpoint_") -> Path:
    """The newest checkpoint that is whole and undamaged. Newer ones are renamed: the run will need their numbers again.

    Interrupted saves are finished first. What is skipped is logged.

    Raises:
        CheckpointError: if there is none; then all stay as they are.
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
    raise CheckpointError(f"there is no whole checkpoint in {parent}")


def _clear_away(parent: Path, prefix: str, damaged: list[Path]) -> None:
    """Rename damaged checkpoints, and remove what a killed run has left unfinished."""
    for folder in damaged:
        with contextlib.suppress(OSError):
            folder.rename(f"{folder}.damaged-{uuid.uuid4().hex[:8]}")
    for left_over in parent.glob(f".{glob.escape(prefix)}*.staging*"):
        remove(left_over)


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
    doomed = folder.with_name(f".{folder.name}.staging")
    remove(doomed)
    folder.rename(doomed)
    remove(doomed)
