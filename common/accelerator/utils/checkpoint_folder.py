"""The folders of checkpoints: written, found and removed so that a kill at any moment loses no complete checkpoint.

The main process writes the main part of a checkpoint, every other process a rank part. Each part begins in a hidden
folder of its own. When ranks 0 and 1 save to the folder `c`, these are

    .c.part_0 and .c.part_1   beside c, as long as there is no c
    c/.part_0 and c/.part_1   in c, if that has an older checkpoint or other files

and the save takes these steps, where rank 1 may be earlier or later than rank 0:

    1. Each rank writes its files.
    2. Each rank writes its manifest, the list of these files. Now its part is *complete*.
    3. Rank 0 renames .c.part_0 to c, or moves the files of c/.part_0 to c, the manifest last. Now the checkpoint is
       *complete*.
    4. The later one of the two moves the files of rank 1 to c, the manifest last.

If rank 0 is killed before c/.part_0 is complete, the older checkpoint is as it was. If it is killed later, the next
save or load moves the files that are left. If it is killed before it has renamed .c.part_0, there is no c yet. A rank
part stays away if its rank has failed, was killed or does not save. Loading says which are not there.

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
    Manifest,
    describe_files,
    files_in,
    is_manifest,
    read_manifest,
    verify,
    write_manifest,
)

logger = logging.getLogger(__name__)


class Part:
    """The part of a checkpoint that this process writes.

    Attributes:
        folder: the folder of the checkpoint.
        save_id: the id of the save, which is the same on all ranks.
        path: the hidden folder of the part.
    """

    def __init__(self, folder: Path, save_id: str, is_main: bool) -> None:
        state = PartialState()
        self.folder = folder
        self.save_id = save_id
        self.is_main = is_main
        self.rank = state.process_index
        self.world_size = state.num_processes
        if folder.exists():
            self.path = folder / f".part_{self.rank}"
        else:
            self.path = folder.with_name(f".{folder.name}.part_{self.rank}")
        self.manifest_name = MANIFEST_NAME if is_main else RANK_MANIFEST_NAME.format(self.rank)

    def begin(self) -> None:
        """Make an empty folder for the part, after finishing an earlier save that was interrupted."""
        if self.is_main:
            finish_interrupted_save(self.folder)
        for path in _hidden_parts(self.folder, self.rank):
            remove(path)
        self.path.mkdir(parents=True)

    def publish(self) -> None:
        """Complete the part, and move what belongs together to its place. Other files in the folder stay.

        Raises:
            CheckpointError: if the part holds a symbolic link, or something is in the way of a file of the main part.
                Then nothing in the folder is changed.
        """
        files = describe_files(self.path)
        if self.is_main:
            _require_places_for(files, self.folder)
        manifest = Manifest(self.save_id, self.rank, self.world_size, files)
        write_manifest(manifest, self.path / self.manifest_name)
        if self.is_main:
            if self.folder.exists():
                _move_files(self.path, self.folder)
            else:
                self.path.rename(self.folder)
        _move_rank_parts(self.folder)

    def discard(self) -> None:
        """Remove the part, because the save has failed. A complete part stays, because its files may be on the way."""
        if _save_of(self.path, self.manifest_name) is None:
            remove(self.path)


def _hidden_parts(folder: Path, rank: int | str = "*") -> list[Path]:
    """The hidden folders of `rank`, by default of all ranks, in `folder` and beside it."""
    beside = f".{glob.escape(folder.name)}.part_{rank}"
    return [*folder.glob(f".part_{rank}"), *folder.parent.glob(beside)]


def remove(path: Path) -> None:
    """Remove a file, a link or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def finish_interrupted_save(folder: Path) -> None:
    """Move the files of all complete parts of the checkpoint in `folder` to their places.

    If they cannot be moved, as on a read-only disk, a warning says so, and `folder` is loaded as it is.
    """
    try:
        for path in sorted(folder.glob(".part_*")):
            if _save_of(path, MANIFEST_NAME) is not None:
                _move_files(path, folder)
        _move_rank_parts(folder)
    except (OSError, CheckpointError) as error:
        logger.warning("%s: an interrupted save cannot be finished: %s", folder, error)


def _move_rank_parts(folder: Path) -> None:
    """Move the rank parts that belong to the main part in `folder` to their places. A file of the main part stays."""
    try:
        main = read_manifest(folder / MANIFEST_NAME)
    except CheckpointError:
        return  # They wait until it is there.
    for path in _hidden_parts(folder):
        rank = path.name.rpartition("_")[2]
        if _save_of(path, RANK_MANIFEST_NAME.format(rank)) != main.save:
            continue
        try:
            _move_files(path, folder, unless_in=main.files)
        except FileNotFoundError:
            continue  # Another rank is moving this part, and does the rest.
        except CheckpointError as error:
            logger.warning("%s does not fit the main part, and is left out: %s", path, error)


def _save_of(path: Path, manifest_name: str) -> str | None:
    """The id of the save to which a hidden part belongs; None if it is not complete, or has another manifest."""
    if path.is_symlink():
        return None
    try:
        return read_manifest(path / manifest_name).save
    except (CheckpointError, FileNotFoundError):  # Another rank may have moved it just now.
        return None


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
    """The newest checkpoint in `parent` that is complete and undamaged, after clearing up what killed saves have left.

    Interrupted saves are finished. Each damaged checkpoint that is newer is logged and renamed, because the run will
    need its number again. What is left over then is removed. No process may be saving meanwhile.

    Raises:
        CheckpointError: if no checkpoint is complete and undamaged; then all stay as they are.
    """
    folders = numbered(parent, prefix)
    for folder in folders:
        finish_interrupted_save(folder)
    newest = _first_undamaged(folders)
    if newest is None:
        raise CheckpointError(f"there is no complete and undamaged checkpoint in {parent}")
    logger.info("resuming from %s", newest)
    # Where nobody may write, all of this stays. The run can go on nevertheless.
    for damaged in folders[: folders.index(newest)]:
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
            verify(folder)
            return folder
        except CheckpointError as error:
            logger.warning("skipping a checkpoint: %s", error)
    return None


def _leftovers(parent: Path, prefix: str) -> list[Path]:
    """The paths that killed or failed processes have left, if all interrupted saves have been finished."""
    found: list[Path] = []
    for kind in ("part_*", "removed"):
        found += parent.glob(f".{glob.escape(prefix)}*.{kind}")
    for folder in numbered(parent, prefix):
        found += folder.glob(".part_*")
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
