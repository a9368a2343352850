"""Checkpoint folders: each is there as a whole or not at all, and none is trusted before all of it has been checked.

A folder holds files and a manifest with the format's version and the size and checksum of every file. (They find
damage, not forgery: whoever changes a file can change them too.) A save writes all files into a draft beside the
folder, and renames it when it is complete. Where there is a folder already, with an older checkpoint or files of the
user, the draft is in it and is renamed to `.complete`. That is the one moment in which the checkpoint comes to be. Its
files are then moved to their places, and the next save or load finishes that if it was interrupted. Nobody waits for
the disk: after a power failure the newest checkpoint may be damaged, and the one before it is taken.

A folder may come from anywhere. So only files are opened or moved that were found by walking through it, which follows
no link; a name in a manifest says which of these belong to the checkpoint. (There is no protection against somebody who
changes the folder while it is being read.)
"""

import contextlib
import json
import logging
import os
import re
import shutil
import uuid
import zlib
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

# Increase it when the content of the files changes so that older code could not resume from newer files, or newer code
# from older ones.
FORMAT_VERSION = 8
MANIFEST_NAME = "manifest.json"
COMPLETE_NAME = ".complete"
_BYTES_IN_BLOCK = 2**18
_FACTOR = 1_000_003  # odd, so that no difference is lost

# The size of a file and its checksum.
Description = dict[str, int]
# The description of each file, by its name in the folder.
Manifest = dict[str, Description]


class CheckpointError(ValueError):
    """A checkpoint is not there, incomplete, damaged, forged, of another format, or was not written by `save_state`."""


# The manifest


def describe(path: Path) -> Description:
    """The size of a file in bytes, and its checksum: a polynomial of the sums of its blocks, as numbers of 8 bytes.

    What lies behind the last whole block, which may be all of a file, is one number more: its CRC-32. Any changed bit
    changes the checksum, and so do blocks that change places; numbers that change places within a block do not. A
    mapped file is summed without a copy and in one call, where a CRC-32 can take longer than all of the save.
    """
    size = path.stat().st_size
    content = torch.from_file(str(path), size=size, dtype=torch.uint8)
    num_blocks = size // _BYTES_IN_BLOCK
    whole = num_blocks * _BYTES_IN_BLOCK
    blocks = content[:whole].view(torch.int64).view(num_blocks, _BYTES_IN_BLOCK // 8)
    with path.open("rb") as file:
        file.seek(whole)
        rest = file.read()
    checksum = 0
    for number in (*blocks.sum(dim=1).tolist(), zlib.crc32(rest)):
        checksum = (checksum * _FACTOR + number) % 2**64
    return {"bytes": size, "checksum": checksum}


def write_manifest(folder: Path) -> None:
    """Write the descriptions of all files of `folder` into its manifest.

    Raises:
        CheckpointError: if there is a link in the folder, which no load would follow.
        OSError: if something cannot be read or written.
    """
    links = [path for path in folder.rglob("*") if path.is_symlink()]
    if links:
        raise CheckpointError(f"{links[0]} is a symbolic link: a checkpoint holds files only")
    files = {name: describe(path) for name, path in _files_in(folder).items() if name != MANIFEST_NAME}
    content = {"format_version": FORMAT_VERSION, "files": files}
    (folder / MANIFEST_NAME).write_text(json.dumps(content, indent=1))


def _files_in(folder: Path) -> dict[str, Path]:
    """The files in `folder` and its subfolders by their names in it. Links are not followed, and are none."""
    files = {}
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            files[path.relative_to(folder).as_posix()] = path
    return files


def read_manifest(folder: Path) -> Manifest:
    """The files of `folder`, as its manifest lists them. Neither names nor descriptions have been checked.

    Raises:
        CheckpointError: if there is none, or it is damaged or of another format.
    """
    path = folder / MANIFEST_NAME
    if not folder.exists():
        raise CheckpointError(f"Tried to find {folder} but folder does not exist")
    if path.is_symlink() or not path.is_file():
        raise CheckpointError(
            f"{folder} holds no {MANIFEST_NAME}: it is no checkpoint of save_state, or an unfinished one"
        )
    try:
        content = json.loads(path.read_bytes())
        version = content["format_version"]
        files = content["files"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    if version != FORMAT_VERSION:
        raise CheckpointError(f"{folder} is a checkpoint in format {version!r}; this code reads {FORMAT_VERSION}")
    if not isinstance(files, dict):
        raise CheckpointError(f"{path} is damaged: it lists no files")
    return files


def verify(folder: Path) -> None:
    """Compare every file with the manifest of `folder`.

    Raises:
        CheckpointError: naming the first file that is not as the manifest says.
    """
    manifest = read_manifest(folder)
    files = _files_in(folder)
    for name, description in manifest.items():
        if name not in files:
            raise CheckpointError(f"{folder}/{name} is missing")
        if describe(files[name]) != description:
            raise CheckpointError(f"{folder}/{name} is not what was saved: it was cut short or changed")


def finish_and_verify(folder: Path) -> None:
    """Finish a save that was interrupted, and verify the checkpoint.

    Raises:
        CheckpointError: if the save cannot be finished, or a file is not as the manifest says.
    """
    finish_interrupted_save(folder)
    verify(folder)


# Saving


def start_save(folder: Path) -> Path:
    """Make an empty draft for the files of a checkpoint in `folder`, and return its path.

    Raises:
        CheckpointError: if an earlier save was interrupted and cannot be finished.
        OSError: if the draft cannot be made.
    """
    finish_interrupted_save(folder)
    draft = folder / ".draft" if folder.exists() else _draft_beside(folder)
    remove(draft)
    draft.mkdir(parents=True)
    return draft


def _draft_beside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.draft")


def remove(path: Path) -> None:
    """Remove a file, a link or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def publish(draft: Path, folder: Path) -> None:
    """Make what is in `draft`, with its manifest, the checkpoint in `folder`. Other files there stay.

    Raises:
        CheckpointError: if `folder` holds something that is in the way. The checkpoint that was there before still is.
        OSError: if something could not be renamed; likewise.
    """
    if draft.parent == folder:
        _moves(draft, folder)  # raises where something is in the way, before the draft counts as complete
        draft.rename(folder / COMPLETE_NAME)
        finish_interrupted_save(folder)
    else:
        draft.rename(folder)


def finish_interrupted_save(folder: Path) -> None:
    """If a complete draft waits in `folder`, move its files to their places; otherwise do nothing.

    Raises:
        CheckpointError: if what is there cannot have been left by a save; then nothing is touched.
    """
    complete = folder / COMPLETE_NAME
    if complete.is_symlink() or complete.is_file():
        raise CheckpointError(f"{complete} is no folder")
    if complete.is_dir():
        for file, place in _moves(complete, folder):
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(file, place)
        shutil.rmtree(complete)


def _moves(complete: Path, folder: Path) -> list[tuple[Path, Path]]:
    """Each file in `complete` with its place in `folder`, the manifest last.

    Raises:
        CheckpointError: if one of the places is a folder, or behind a link.
    """
    moves = []
    files = _files_in(complete)
    for name in sorted(files, key=lambda name: name == MANIFEST_NAME):
        place = folder / name
        if place.is_dir() or place.parent.resolve() != folder.resolve() / Path(name).parent:
            raise CheckpointError(f"{place} is a folder or behind a link, where a file is to be")
        moves.append((files[name], place))
    return moves


# Several checkpoints side by side


def numbered(parent: Path, prefix: str = "checkpoint_") -> list[Path]:
    """The folders in `parent` whose names are `prefix` and a number, the highest number first; no links."""
    if not parent.is_dir():
        return []
    pattern = re.compile(re.escape(prefix) + "[0-9]+")
    found = [path for path in parent.iterdir() if pattern.fullmatch(path.name)]
    folders = [path for path in found if path.is_dir() and not path.is_symlink()]
    return sorted(folders, key=lambda path: int(path.name.removeprefix(prefix)), reverse=True)


def choose_newest(parent: Path, prefix: str = "checkpoint_") -> Path:
    """Choose the whole checkpoint with the highest number, and verify it.

    An interrupted save is finished first. Damaged checkpoints with higher numbers are logged, and renamed; drafts that
    a killed run has left are removed.

    Raises:
        CheckpointError: if none is whole; then all stay as they are.
    """
    damaged = []
    for folder in numbered(parent, prefix):
        try:
            finish_and_verify(folder)
        except CheckpointError as error:
            logger.warning("skipping a checkpoint: %s", error)
            damaged.append(folder)
            continue
        logger.info("resuming from %s", folder)
        for other in damaged:  # The run will need their numbers again.
            with contextlib.suppress(OSError):
                other.rename(f"{other}.damaged-{uuid.uuid4().hex[:8]}")
        for draft in parent.glob(f".{prefix}*.draft"):
            remove(draft)
        return folder
    raise CheckpointError(f"there is no complete checkpoint in {parent}")


def remove_old_checkpoints(just_written: Path, limit: int) -> None:
    """Remove checkpoints beside `just_written` until at most `limit`, and at least that one, are left.

    Those of higher numbers are of an earlier run, so they count as older than those of lower numbers.

    Raises:
        OSError: if one cannot be removed.
    """
    complete = [path for path in numbered(just_written.parent) if (path / MANIFEST_NAME).exists()]
    from_just_written = complete[complete.index(just_written) :] + complete[: complete.index(just_written)]
    for old in from_just_written[max(limit, 1) :]:
        remove_folder(old)


def remove_folder(folder: Path) -> None:
    """Remove `folder`. It gives up its name first: half a folder never bears the name of a whole one.

    Raises:
        OSError: if it cannot be renamed or removed.
    """
    doomed = _draft_beside(folder)
    remove(doomed)
    folder.rename(doomed)
    remove(doomed)
