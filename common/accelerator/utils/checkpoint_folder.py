"""The folders of checkpoints: written, found and removed so that a kill at any moment loses no complete checkpoint.

The main process writes the main part, every other process a rank part. A save of ranks 0 and 1 to the folder `c`:

       who              does       if c is new                   if c exists, with an older checkpoint or other files
    1  each rank        writes     .c.staging_0, .c.staging_1    the same
    2  rank 1           renames    .c.staging_1 to .c.part_1     the same
    3  rank 0           renames    .c.staging_0 to c             .c.staging_0 to c/.new
    4  rank 0           moves      nothing                       the files of c/.new to c
    5  the last rank    moves      the files of .c.part_1 to c   the same

If `c` is a mount point, or its parent is read-only, the hidden folders are in it: c/.staging_1 and c/.part_1.

With step 3 the checkpoint begins to exist. After a kill before it, the older checkpoints are as they were, and nobody
loads what is left over. After a later kill, the next save or load takes the steps that are missing.

- A rename is atomic. So .c.part_1, c/.new and a new c each appear with all files of their part.
- A part is *complete* when its manifest, the list of its files, is in its place. So the manifest is written and moved
  last. A checkpoint is *complete* when its main part is. Rank parts may come later, or never if their rank has failed
  or does not save. Loading says which are not there.
- Of each rank only the newest part waits for its main part.
- If two ranks take step 5 at once, each file is renamed once.
- Hooks may write a file of one name on several ranks. That of the main part stays; without one, the last to be moved.

With `save_on_each_node` the first process of each machine writes a main part, to its own disk. Files are not fsynced,
so after a power failure the newest checkpoint may be damaged. Loading finds this out. Without a name it takes the
newest one that is undamaged on the disk of the first machine.

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


class Part:
    """The part of a checkpoint that this process writes.

    Attributes:
        save_id: the id of the save, which is the same on all ranks.
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
        self.staging.mkdir(parents=True)

    def publish(self) -> None:
        """Complete this part, and merge what belongs together. Files in the folder that are no part of it stay.

        A warning names a rank part that does not fit the main part, such as a file where that has a folder.

        Raises:
            CheckpointError: if the staging folder holds a symbolic link, or something is in the way of a file of the
                main part. Then nothing in the folder is changed.
        """
        name = MANIFEST_NAME if self.is_main else RANK_MANIFEST_NAME.format(self.rank)
        manifest = PartManifest(self.save_id, self.rank, self.world_size, describe_files(self.staging))
        write_part_manifest(manifest, self.staging / name)
        if not self.is_main:
            remove(self.pending)  # It is of an earlier save into this folder, whose main part has not come yet.
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
        return  # They go on waiting.
    for part in _pending_parts(folder, main.save):
        try:
            _move_files(part, folder, unless_in=main.files)
        except FileNotFoundError:
            continue  # Another rank is moving this part, and does the rest.
        except CheckpointError as error:
            logger.warning("%s does not fit the main part, and is left out: %s", part, error)


def _pending_parts(folder: Path, save_id: str) -> list[Path]:
    """The complete rank parts of this save that are not in `folder` yet."""
    without_rank = _hidden_path(folder, "part_")
    found = []
    for path in sorted(without_rank.parent.glob(f"{glob.escape(without_rank.name)}*")):
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
    for name in sorted(files, key=is_manifest):  # False comes before True, so the manifest is moved last.
        if name not in unless_in:
            place = folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(files[name], place)
    shutil.rmtree(source)


def _require_places_for(names: Iterable[str], folder: Path) -> None:
    """Raise a CheckpointError if something is in the way of one of these files in `folder`."""
    resolved = folder.resolve()
    for name in names:
        place = folder / name
        is_below_file = any((folder / above).is_file() for above in Path(name).parents)
        is_behind_link = place.parent.resolve() != resolved / Path(name).parent
        if is_below_file or is_behind_link or place.is_dir():
            raise CheckpointError(f"{place} is a folder, or behind a link or a file, where a file is to be")


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

    Interrupted saves are finished. Each damaged checkpoint that is newer is logged and renamed, because the run will
    need its number again. What else killed processes have left is removed. No process may be saving meanwhile.

    Raises:
        CheckpointError: if no checkpoint is complete and undamaged; then all stay as they are.
    """
    folders = numbered(parent, prefix)
    newest = _first_undamaged(folders)
    if newest is None:
        raise CheckpointError(f"there is no complete and undamaged checkpoint in {parent}")
    logger.info("resuming from %s", newest)
    place = folders.index(newest)
    for older in folders[place + 1 :]:
        with contextlib.suppress(CheckpointError):
            finish_interrupted_save(older)
    # Where nobody may write, all of it stays. The run can go on from there nevertheless.
    for damaged in folders[:place]:
        with contextlib.suppress(OSError):
            damaged.rename(f"{damaged}.damaged-{uuid.uuid4().hex[:8]}")
    for path in _leftovers(parent, prefix):
        with contextlib.suppress(OSError):
            remove(path)
    return newest


def _first_undamaged(folders: list[Path]) -> Path | None:
    """The first of `folders` that holds a complete and undamaged checkpoint. Those before it are logged."""
    for folder in folders:
        try:
            finish_and_verify(folder)
            return folder
        except CheckpointError as error:
            logger.warning("skipping a checkpoint: %s", error)
    return None


def _leftovers(parent: Path, prefix: str) -> list[Path]:
    """The paths that killed or failed processes have left, if all interrupted saves have been finished."""
    found: list[Path] = []
    for kind in ("staging_*", "part_*", "removed"):
        found += parent.glob(f".{glob.escape(prefix)}*.{kind}")
    for folder in numbered(parent, prefix):
        found += folder.glob(".staging_*")
    return found


def finish_and_verify(folder: Path) -> None:
    """Finish a save that was interrupted, and verify the checkpoint. What is wrong with it is a CheckpointError."""
    finish_interrupted_save(folder)
    verify(folder)


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
