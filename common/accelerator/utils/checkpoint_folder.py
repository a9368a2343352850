"""The folders of checkpoints: written, found and removed so that a kill at any moment loses no complete checkpoint.

The main process writes the main part of a checkpoint, every other process a rank part. When ranks 0 and 1 save to the
folder `c`, there are these hidden folders for a while:

    .c.draft_0, .c.draft_1    the parts while they are written
    .c.part_1_ID              the complete part of rank 1 in the save with this id
    c/.main_part              the complete main part, if c has an older checkpoint or other files

The save takes these steps, where rank 1 may be earlier or later than rank 0:

    1. Each rank writes its files to its draft, and then its manifest, the list of these files.
    2. Rank 1 renames its draft to .c.part_1_ID.
    3. Rank 0 renames its draft to c. If c exists, it renames its draft to c/.main_part, and moves the files from there
       to c, the manifest last. Now the checkpoint is *complete*.
    4. The later one of the two moves the files of .c.part_1_ID to c, the manifest last.

A rename is atomic, so a part is complete as soon as its folder has the name of step 2 or 3. If rank 0 is killed before
step 3, the older checkpoint is as it was. If it is killed later, the next save or load moves the files that are left.
Of each rank only the newest part waits for its main part. If a rank has failed, was killed or does not save, the
checkpoint has no part of it, and loading says so.

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

MAIN_PART_NAME = ".main_part"


def draft_of_this_rank(folder: Path) -> Path:
    """The hidden folder in which this rank writes its part of the checkpoint in `folder`."""
    return _hidden_path(folder, f"draft_{PartialState().process_index}")


def publish_main_part(draft: Path, folder: Path, save_id: str) -> None:
    """Make a checkpoint of `draft`, and of the parts of its save that other ranks have completed.

    Raises:
        CheckpointError: if the draft holds a symbolic link or a file with the name of a manifest, or something is in
            the way of a file. Then nothing in `folder` is changed.
        OSError: if a file cannot be moved.
    """
    _write_manifest(draft, MANIFEST_NAME, save_id)
    _require_places_for(files_in(draft), folder)
    draft.rename(folder / MAIN_PART_NAME if folder.exists() else folder)
    finish_save(folder)


def publish_rank_part(draft: Path, folder: Path, save_id: str) -> None:
    """Complete the part in `draft`, and move it to `folder` if the main part of its save is there.

    Raises:
        CheckpointError: if the draft holds a symbolic link or a file with the name of a manifest.
        OSError: if a file cannot be moved.
    """
    rank = PartialState().process_index
    _write_manifest(draft, RANK_MANIFEST_NAME.format(rank), save_id)
    complete = _hidden_path(folder, f"part_{rank}_{save_id}")
    draft.rename(complete)
    earlier = [path for path in _hidden_paths(folder, f"part_{rank}_*") if path != complete]
    for path in earlier:
        # Rank 0 may be moving its files just now. It cannot move any file as soon as this has another name.
        with contextlib.suppress(FileNotFoundError):
            path.rename(draft)
            remove(draft)
    _move_rank_parts(folder)


def _write_manifest(draft: Path, name: str, save_id: str) -> None:
    rank = PartialState().process_index
    world_size = PartialState().num_processes
    write_manifest(Manifest(save_id, rank, world_size, describe_files(draft)), draft / name)


def _hidden_path(folder: Path, name: str) -> Path:
    """A hidden path beside `folder`, from where a rename leads to `folder` or into it.

    If `folder` is a link or a mount point, or its parent is read-only, the path is inside.
    """
    must_be_inside = folder.is_symlink() or os.path.ismount(folder) or not os.access(folder.parent, os.W_OK)
    if folder.exists() and must_be_inside:
        return folder / f".{name}"
    return folder.with_name(f".{folder.name}.{name}")


def _hidden_paths(folder: Path, pattern: str) -> list[Path]:
    return [*folder.glob(f".{pattern}"), *folder.parent.glob(f".{glob.escape(folder.name)}.{pattern}")]


def remove(path: Path) -> None:
    """Remove a file, a link or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def finish_save(folder: Path) -> None:
    """Move the files of all complete parts of the checkpoint in `folder` to their places.

    Raises:
        CheckpointError: if something is in the way of a file of the main part; then none of its files is moved.
        OSError: if they cannot be moved.
    """
    main_part = folder / MAIN_PART_NAME
    if main_part.is_symlink() or main_part.is_file():
        raise CheckpointError(f"{main_part} is no folder")
    if main_part.is_dir():
        _move_files(main_part, folder)
    _move_rank_parts(folder)


def _move_rank_parts(folder: Path) -> None:
    """Move the rank parts that belong to the main part in `folder` to their places. A file of the main part stays."""
    try:
        main = read_manifest(folder / MANIFEST_NAME)
    except (CheckpointError, FileNotFoundError):
        return  # They wait for it, or rank 0 has removed this checkpoint.
    for path in _hidden_paths(folder, "part_*"):
        if path.is_symlink() or not path.name.endswith(f"_{main.save}"):
            continue
        try:
            _move_files(path, folder, unless_in=main.files)
        except FileNotFoundError:
            continue  # Another rank is moving this part, and does the rest, or rank 0 has removed the checkpoint.
        except CheckpointError as error:
            logger.warning("%s does not fit the main part, and is left out: %s", path, error)


def _move_files(source: Path, folder: Path, unless_in: Collection[str] = ()) -> None:
    """Move the files of `source` to their places in `folder`, but those named in `unless_in`, and remove `source`."""
    files = files_in(source)
    _require_places_for(files, folder)
    for name in sorted(files, key=is_manifest):  # False comes before True, so the manifest is moved last.
        if name not in unless_in:
            # `folder` itself is not made: rank 0 may have removed it, because of `total_limit`.
            for subfolder in reversed(Path(name).parents[:-1]):
                (folder / subfolder).mkdir(exist_ok=True)
            os.replace(files[name], folder / name)
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


def finish_or_warn(folder: Path) -> None:
    """`finish_save` before loading: if it fails, as on a read-only disk, `folder` is loaded as it is."""
    try:
        finish_save(folder)
    except (OSError, CheckpointError) as error:
        logger.warning("%s: an interrupted save cannot be finished: %s", folder, error)


def finish_and_verify(folder: Path) -> None:
    """Finish a save that was interrupted, and verify the checkpoint. What is wrong with it is a CheckpointError."""
    finish_or_warn(folder)
    verify(folder)


def recover_newest(parent: Path, prefix: str = "checkpoint_") -> Path:
    """The newest checkpoint in `parent` that is complete and undamaged, after clearing up what killed saves have left.

    Interrupted saves are finished. Each damaged checkpoint that is newer is logged and renamed, because the run will
    need its number again. What is left over then is removed. No process may be saving meanwhile.

    Raises:
        CheckpointError: if no checkpoint is complete and undamaged; then nothing is renamed or removed.
    """
    folders = numbered(parent, prefix)
    for folder in folders:
        finish_or_warn(folder)
    damaged: dict[Path, str] = {}
    for newest in folders:
        try:
            verify(newest)
            break
        except CheckpointError as error:
            damaged[newest] = str(error)
    else:
        none_is_left = f"there is no complete and undamaged checkpoint in {parent}"
        raise CheckpointError("; ".join([none_is_left, *damaged.values()]))
    # Where nobody may write, all of this stays. The run can go on nevertheless.
    for path, error_text in damaged.items():
        logger.warning("skipping a checkpoint: %s", error_text)
        with contextlib.suppress(OSError):
            path.rename(f"{path}.damaged-{uuid.uuid4().hex[:8]}")
    logger.info("resuming from %s", newest)
    for path in _leftovers(parent, prefix):
        with contextlib.suppress(OSError):
            remove(path)
    return newest


def _leftovers(parent: Path, prefix: str) -> list[Path]:
    """The paths that killed or failed processes have left, if all interrupted saves have been finished."""
    found: list[Path] = []
    for kind in ("draft_*", "part_*", "removed"):
        found += parent.glob(f".{glob.escape(prefix)}*.{kind}")
    for folder in numbered(parent, prefix):
        found += folder.glob(".draft_*")
    return found


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
