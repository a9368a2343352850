"""The files of a checkpoint: saved, found, loaded and rotated so that a kill at any moment loses no whole checkpoint.

No process waits for another. Each one that saves writes a **part**. The main process writes the *main part*, which has
what all ranks share: weights, optimizers and so on. Every other rank writes a *rank part*, with its random states and
gradients. With `save_on_each_node`, the first process of each machine writes a main part. Each part has a **manifest**,
the list of its files, which is written last: a part with its manifest is **finished**. A checkpoint is **whole** if it
has the parts of all ranks that it expects; `checkpoint_manifest.py` tells this from the manifests.

The life of a save to the folder `c` on ranks 0 and 1, as file operations:

1. Stage. Each rank makes an empty staging folder beside `c`, `.c.staging_0` or `.c.staging_1`, and writes its files
   and then its manifest there.
2. Publish a rank part. Rank 1 renames `.c.staging_1` to `.c.part_1`. The part waits there for the main part.
3. Publish the main part. Rank 0 renames `.c.staging_0` to `c`. At this moment the checkpoint begins to exist.
   If `c` exists already, with an older checkpoint or files of the user, there are three steps instead:
   a. If a part may be missing, link the files of the old checkpoint into `c/.previous` too.
   b. Rename `.c.staging_0` to `c/.new`. At this moment the new checkpoint begins to exist.
   c. Move the files of `c/.new` to their places in `c`, the manifest last.
4. Merge. Rank 0 or rank 1, whichever comes last, moves the files of `.c.part_1` into `c`, the manifest last.
5. Clean up. The next save or load removes `c/.previous` if the checkpoint in `c` is whole.

A rename is atomic, so each of these folders has all of its files or does not exist. A process that is killed in steps 1
or 2 leaves a staging folder, which is never read. One that is killed in steps 3 to 5 leaves finished parts, and the
next save or load moves them to their places (`finish_interrupted_save`). Nobody waits for the disk: after a power
failure the newest checkpoint may be damaged. Verification finds this out, and the checkpoint before it is loaded.

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
from dataclasses import dataclass
from pathlib import Path

from .checkpoint_manifest import (
    MANIFEST_NAME,
    RANK_MANIFEST_NAME,
    CheckpointError,
    files_in,
    is_whole,
    read_manifest,
    read_part_manifest,
    verify,
    write_manifest,
)

logger = logging.getLogger(__name__)

NEW_NAME = ".new"
PREVIOUS_NAME = ".previous"


# Write: steps 1 to 3


@dataclass
class Part:
    """The part that one process writes in one save.

    Attributes:
        folder: the folder of the checkpoint.
        save_id: the id of the save, which is the same on all ranks.
        is_main: True for the main part.
    """

    folder: Path
    save_id: str
    rank: int
    world_size: int
    is_main: bool

    @property
    def staging(self) -> Path:
        """The folder in which the part is written."""
        return _beside(self.folder, f"staging_{self.rank}")

    @property
    def pending(self) -> Path:
        """The folder in which a finished rank part waits for the main part."""
        return _beside(self.folder, f"part_{self.rank}")

    def stage(self) -> None:
        """Make an empty staging folder, after finishing an earlier save that was interrupted."""
        if self.is_main:
            finish_interrupted_save(self.folder)
        self.discard()
        self.staging.mkdir(parents=True)

    def discard(self) -> None:
        """Remove the files of this part that are not in the checkpoint's folder."""
        remove(self.staging)
        remove(self.pending)

    def publish_rank_part(self) -> None:
        """Finish this rank part, and merge it if the main part is there already."""
        write_manifest(self.staging, RANK_MANIFEST_NAME.format(self.rank), self.save_id, self.rank, self.world_size, [])
        self.staging.rename(self.pending)
        _merge_pending_parts(self.folder)

    def publish_main_part(self, folder_before: Path) -> set[int]:
        """Finish this main part, put it into its folder, merge the pending parts, and return the ranks it expects.

        These are the ranks whose parts are pending, and those in the checkpoint in `folder_before`, if there is one.
        Other files in the folder stay. A CheckpointError says that one of them is in the way; then nothing is changed.
        """
        present = {self.rank, *_pending_parts(self.folder, self.save_id)}
        expected = set(present)
        with contextlib.suppress(CheckpointError):
            expected.update(rank for rank in read_manifest(folder_before).ranks if rank < self.world_size)
        write_manifest(self.staging, MANIFEST_NAME, self.save_id, self.rank, self.world_size, sorted(expected))
        if not self.folder.exists():
            self.staging.rename(self.folder)
        else:
            _files_and_places(self.staging, self.folder)  # raises if something is in the way
            if expected != present:
                _link_to_previous(self.folder)
            self.staging.rename(self.folder / NEW_NAME)
        finish_interrupted_save(self.folder)
        return expected


def _beside(folder: Path, name: str) -> Path:
    """A hidden path beside `folder`. It is inside of a mount point, or of a folder whose parent is read-only."""
    is_open_to_renames = os.access(folder.parent, os.W_OK) and not os.path.ismount(folder)
    if folder.exists() and not is_open_to_renames:
        return folder / f".{name}"
    return folder.with_name(f".{folder.name}.{name}")


def _link_to_previous(folder: Path) -> None:
    """Give the files of the checkpoint in `folder`, if it is whole, second names in `.previous`."""
    if not is_whole(folder):
        return
    names = read_manifest(folder).files
    staging = folder / f"{PREVIOUS_NAME}.staging"
    remove(staging)
    for name, file in files_in(folder).items():
        if name in names or _is_manifest(name):
            place = staging / name
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(file, place)
            except OSError:  # a disk without hard links
                shutil.copyfile(file, place)
    remove(folder / PREVIOUS_NAME)
    staging.rename(folder / PREVIOUS_NAME)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# Finish: steps 3c to 5


def finish_interrupted_save(folder: Path) -> None:
    """Move the files of all finished parts of the checkpoint in `folder` to their places.

    Raises:
        CheckpointError: if no save can have left what is there; then nothing is touched.
    """
    new = folder / NEW_NAME
    previous = folder / PREVIOUS_NAME
    for path in (new, previous):
        if path.is_symlink() or path.is_file():
            raise CheckpointError(f"{path} is no folder")
    if new.is_dir():
        _move_files(new, folder)
    _merge_pending_parts(folder)
    if previous.is_dir() and is_whole(folder):
        shutil.rmtree(previous)


def _merge_pending_parts(folder: Path) -> None:
    """Move the rank parts that wait for the main part in `folder` to their places. A file of the main part stays."""
    try:
        main = read_part_manifest(folder / MANIFEST_NAME)
    except CheckpointError:
        return
    for part in _pending_parts(folder, main["save"]).values():
        with contextlib.suppress(FileNotFoundError):  # the main process and the rank of this part may meet here
            _move_files(part, folder, unless_in=main["files"])


def _pending_parts(folder: Path, save_id: str) -> dict[int, Path]:
    """The finished rank parts of a save that are not in its folder yet, by their ranks."""
    pattern = _beside(folder, "part_")
    found = {}
    for path in pattern.parent.glob(f"{glob.escape(pattern.name)}*"):
        name = RANK_MANIFEST_NAME.format(path.name.rpartition("_")[2])
        with contextlib.suppress(CheckpointError, OSError):  # it is no part, or its own process is moving it
            part = read_part_manifest(path / name)
            if part["save"] == save_id and not path.is_symlink():
                found[part["rank"]] = path
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


def choose_newest(parent: Path, prefix: str = "checkpoint_", finished_run: str | None = None) -> Path:
    """The newest whole checkpoint, see `_find_newest`. What is newer is set aside: the run will need its number again.

    Raises:
        CheckpointError: if all are damaged; then all stay as they are.
    """
    chosen = _find_newest(numbered(parent, prefix), finished_run)
    if chosen is None:
        raise CheckpointError(f"there is no whole checkpoint in {parent}")
    logger.info("resuming from %s", chosen)
    _set_aside_newer_than(chosen, prefix)
    return chosen


def _find_newest(highest_first: list[Path], finished_run: str | None) -> Path | None:
    """The first whole checkpoint, verified; if none is whole, the first undamaged one. Skipped ones are logged.

    Interrupted saves are finished first. For `finished_run` see `is_whole`.
    """
    first_undamaged = None
    for folder in highest_first:
        try:
            finish_and_verify(folder)
        except CheckpointError as error:
            logger.warning("skipping a checkpoint: %s", error)
            continue
        if is_whole(folder, finished_run):
            return folder
        missing = read_manifest(folder).missing
        logger.warning("skipping a checkpoint: in %s the parts of ranks %s are missing", folder, missing)
        first_undamaged = first_undamaged or folder
    return first_undamaged


def _set_aside_newer_than(chosen: Path, prefix: str) -> None:
    """Rename the checkpoints with higher numbers, and remove what a killed run has left unfinished."""
    found = numbered(chosen.parent, prefix)
    for other in found[: found.index(chosen)]:
        with contextlib.suppress(OSError):
            other.rename(f"{other}.damaged-{uuid.uuid4().hex[:8]}")
    for left_over in chosen.parent.glob(f".{glob.escape(prefix)}*.staging*"):
        remove(left_over)


def finish_and_verify(folder: Path) -> None:
    """Finish a save that was interrupted, and verify the checkpoint. What is wrong with it is a CheckpointError."""
    finish_interrupted_save(folder)
    verify(folder)


# Rotate


def remove_old_checkpoints(just_written: Path, limit: int) -> None:
    """Remove checkpoints beside `just_written` until at most `limit`, and at least that one, are left.

    If none of these is whole, the newest whole one stays too. Checkpoints with higher numbers than `just_written` are
    from an earlier run, so they count as older than those with lower numbers.

    Raises:
        OSError: if one cannot be removed.
    """
    highest_first = [path for path in numbered(just_written.parent) if (path / MANIFEST_NAME).exists()]
    place = highest_first.index(just_written)
    newest_first = highest_first[place:] + highest_first[:place]
    kept = newest_first[: max(limit, 1)]
    for old in newest_first[len(kept) :]:
        if any(is_whole(path) for path in kept):
            remove_folder(old)
        else:
            kept.append(old)


def remove_folder(folder: Path) -> None:
    """Remove `folder`. It is renamed first, so that a kill leaves no half of it under its name.

    Raises:
        OSError: if it cannot be renamed or removed.
    """
    doomed = folder.with_name(f".{folder.name}.staging")
    remove(doomed)
    folder.rename(doomed)
    remove(doomed)
