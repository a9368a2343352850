"""The steps from the parts of a save to a checkpoint. A kill at any moment loses no complete checkpoint.

The main process writes the main part of a checkpoint, every other process a rank part. When ranks 0 and 1 save to the
folder `c`, which has an older checkpoint, this is there after each stage:

    stage                                               beside c                   in c
    1  Each rank writes its files to its draft, and     .c.draft_0  .c.draft_1     the older checkpoint
       then its manifest, the list of these files.
    2  Rank 1 renames its draft.                        .c.draft_0  .c.part_1_ID   the older checkpoint
    3  Rank 0 renames its draft.                        .c.part_1_ID               the older checkpoint, .main_part
    4  Rank 0 moves its files to c, the manifest last.  .c.part_1_ID               the new checkpoint
    5  The later one of the two moves the files of      –                          the new checkpoint, with the
       rank 1, the manifest last.                                                  part of rank 1

If there is no `c`, stage 3 makes it, and stage 4 has nothing to do. Rank 1 may also do stage 2 after rank 0's stage 4.

A rename is atomic, so a part is complete as soon as stage 2 or 3 is done. If rank 0 is killed before stage 3, the older
checkpoint is as it was. If it is killed later, the next save or load does what is left. Of each rank only the newest
part waits for its main part, by the ID of the save. If a rank has failed, was killed or does not save, the checkpoint
has no part of it, and loading says so.

With `save_on_each_node` the first process of each machine writes a main part, to its own disk. Files are not fsynced,
so after a power failure the newest checkpoint may be damaged. Loading finds this out.

A folder may come from a stranger. So files are opened or moved only if they were found by walking through the folder,
which follows no symbolic link. A manifest only says which of these files belong to the checkpoint.
"""

import contextlib
import glob
import logging
import os
import shutil
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


def complete_draft(draft: Path, save_id: str, is_main_part: bool) -> None:
    """Write the manifest of a draft that has all its files.

    Raises:
        CheckpointError: if there is a symbolic link or a file with the name of a manifest among them.
    """
    rank = PartialState().process_index
    name = MANIFEST_NAME if is_main_part else RANK_MANIFEST_NAME.format(rank)
    manifest = Manifest(save_id, rank, PartialState().num_processes, describe_files(draft))
    write_manifest(manifest, draft / name)


def publish_rank_part(draft: Path, folder: Path, save_id: str) -> None:
    """Let the complete draft of a rank part wait for its main part, or move it to `folder` if that is there."""
    rank = PartialState().process_index
    complete = _hidden_path(folder, f"part_{rank}_{save_id}")
    draft.rename(complete)
    earlier = [path for path in _hidden_paths(folder, f"part_{rank}_*") if path != complete]
    for path in earlier:
        # Rank 0 may be moving its files just now. It cannot move any file as soon as this has another name.
        with contextlib.suppress(FileNotFoundError):
            path.rename(draft)
            remove(draft)
    _move_rank_parts(folder)


def publish_main_part(draft: Path, folder: Path) -> None:
    """Make a checkpoint of the complete draft of the main part, and of the rank parts of its save that wait for it.

    Raises:
        CheckpointError: if something is in the way of a file. Then nothing in `folder` is changed.
    """
    _require_places_for(files_in(draft), folder)
    draft.rename(folder / MAIN_PART_NAME if folder.exists() else folder)
    finish_save(folder)


def finish_save(folder: Path) -> None:
    """Move the files of all complete parts of the checkpoint in `folder` to their places.

    Raises:
        CheckpointError: if something is in the way of a file of the main part; then none of its files is moved.
    """
    main_part = folder / MAIN_PART_NAME
    if main_part.is_symlink() or main_part.is_file():
        raise CheckpointError(f"{main_part} is no folder")
    if main_part.is_dir():
        _move_files(main_part, folder)
    _move_rank_parts(folder)


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
        if place.is_dir():
            raise CheckpointError(f"{place} is a folder, where a file is to be")
        if any((folder / above).is_file() for above in Path(name).parents):
            raise CheckpointError(f"{place} cannot be made: there is a file in the place of one of its folders")
        if place.parent.resolve() != resolved / Path(name).parent:
            raise CheckpointError(f"{place} is behind a link")


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
