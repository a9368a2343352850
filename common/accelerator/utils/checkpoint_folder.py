"""Checkpoint folders: each is there as a whole or not at all, and none is trusted before all of it has been checked.

A folder holds files and a manifest with the format's version and the size and checksum of every file. (They find
damage, not forgery: whoever changes a file can change them too.) A save writes all files into a draft beside the
folder, and renames it when it is complete. Where there is a folder already, with an older checkpoint or files of the
user, the draft is in it and is renamed to `.complete`. That is the one moment in which the checkpoint comes to be. Its
files are then moved to their places, and the next save or load finishes that if it was interrupted.

A folder may come from anywhere. So a name in a manifest is believed only if it leads to a place within the folder,
without a link on the way, and nothing is touched before all names have been checked. (There is no protection against
somebody who changes the folder while it is being read.)
"""

import contextlib
import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from common.files import forget_draft, new_draft, remove_folder, sync_to_disk

logger = logging.getLogger(__name__)

# Increase it when the content of the files changes so that older code could not resume from newer files, or newer code
# from older ones.
FORMAT_VERSION = 5
MANIFEST_NAME = "manifest.json"
COMPLETE_NAME = ".complete"
# With more, torch would start threads of its own for each sum.
_BYTES_OF_BLOCK = 2**18
_FACTOR = 1_000_003  # odd, so that no difference is lost

# The size of a file and its checksum.
Description = dict[str, int]
# The description of each file, by its name in the folder.
Manifest = dict[str, Description]


class CheckpointError(ValueError):
    """A checkpoint is not there, incomplete, damaged, forged, of another format, or was not written by `save_state`."""


class CheckpointVersionError(CheckpointError):
    """A checkpoint was saved in an older or a newer format."""


# The manifest


def describe(path: Path) -> Description:
    """The size of a file in bytes, and its checksum: a polynomial of the sums of its blocks, as numbers of 8 bytes.

    Any changed bit changes it, and so do blocks that change places. To sum costs little more than to read, where a
    CRC-32 can take longer than all of the save.
    """
    size = 0
    checksum = 0
    block = bytearray(_BYTES_OF_BLOCK)
    numbers = torch.frombuffer(block, dtype=torch.int64)
    # Reading costs a copy that mapping would not. But where a mapped disk fails, the system ends the process.
    with path.open("rb") as file:
        while count := file.readinto(block):
            block[count:] = bytes(len(block) - count)
            checksum = (checksum * _FACTOR + int(numbers.sum())) % 2**64
            size += count
    return {"bytes": size, "checksum": checksum}


def write_manifest(folder: Path, descriptions: Mapping[Path, Future[Description]] | None = None) -> None:
    """Write the descriptions of all files of `folder` into its manifest, and flush everything to the disk.

    Args:
        descriptions: of files that threads flush and describe already.

    Raises:
        CheckpointError: if there is a link in the folder.
        OSError: if something cannot be read or written.
    """
    under_way = descriptions or {}
    manifest_path = folder / MANIFEST_NAME
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise CheckpointError(f"{path} is a symbolic link: a checkpoint holds files only")
        if path.is_dir():
            sync_to_disk(path)
        elif path in under_way:
            files[path.relative_to(folder).as_posix()] = under_way[path].result()
        elif path != manifest_path:
            sync_to_disk(path)
            files[path.relative_to(folder).as_posix()] = describe(path)
    manifest_path.write_text(json.dumps({"format_version": FORMAT_VERSION, "files": files}, indent=1))
    sync_to_disk(manifest_path)
    sync_to_disk(folder)


def read_manifest(folder: Path) -> Manifest:
    """The files of `folder`, as its manifest lists them. Neither names nor descriptions have been checked.

    Raises:
        CheckpointVersionError: if it is of another format.
        CheckpointError: if there is none, or it is damaged.
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
    except (ValueError, TypeError, KeyError, RecursionError, OSError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    if type(version) is not int or not isinstance(files, dict):
        raise CheckpointError(f"{path} is damaged: it must hold a format_version and files")
    if version != FORMAT_VERSION:
        age = "an older" if version < FORMAT_VERSION else "a newer"
        raise CheckpointVersionError(
            f"{folder} is a checkpoint in {age} format, version {version}; this code reads version {FORMAT_VERSION}"
        )
    return files


def _places(folder: Path, names: Iterable[str]) -> list[Path]:
    """The paths of the files `names` in `folder`, where something else may be, or nothing, or nothing ever can.

    Raises:
        CheckpointError: naming the first that leads out of the folder, through a link, or to the parts of a save.
    """
    root = os.path.realpath(folder)
    places = []
    for name in names:
        parts = name.split("/")
        wanted = os.path.join(root, *parts)
        try:
            is_reached = os.path.realpath(wanted) == wanted and Path(wanted).is_relative_to(root)
        except ValueError:  # a character that no name can have
            is_reached = False
        if not is_reached or parts[0] in ("", COMPLETE_NAME, MANIFEST_NAME):
            raise CheckpointError(f"{folder / MANIFEST_NAME} is damaged: {name!r} is no place for a file in {folder}")
        places.append(folder.joinpath(*parts))
    return places


# Saving


def start_save(folder: Path) -> Path:
    """Make an empty draft for the files of a checkpoint in `folder`, and return its path.

    Raises:
        CheckpointError: if an earlier save was interrupted and cannot be finished.
        OSError: if the draft cannot be made.
    """
    finish_interrupted_save(folder)
    draft = new_draft(folder if folder.exists() else folder.parent)
    draft.mkdir(parents=True)
    return draft


def publish(draft: Path, folder: Path) -> None:
    """Make what is in `draft`, with its manifest, the checkpoint in `folder`.

    The files of the checkpoint before go; other files stay.

    Raises:
        CheckpointError: if `folder` holds something that is in the way. The checkpoint that was there before still is.
        OSError: if something could not be renamed; likewise.
    """
    is_new = draft.parent != folder
    if not is_new:
        _check_ways(draft, folder)
    os.rename(draft, folder if is_new else folder / COMPLETE_NAME)
    forget_draft(draft)
    sync_to_disk(draft.parent)
    finish_interrupted_save(folder)


def _check_ways(complete: Path, folder: Path) -> Manifest:
    """The manifest of `complete`, if nothing keeps its files from being moved into `folder`; else a CheckpointError."""
    manifest = read_manifest(complete)
    _places(complete, manifest)
    for place in (*_places(folder, manifest), folder / MANIFEST_NAME):
        if os.path.isdir(place):
            raise CheckpointError(f"{place} is a folder, where a file is to be")
    return manifest


def finish_interrupted_save(folder: Path) -> None:
    """If a complete draft waits in `folder`, move its files to their places; otherwise do nothing.

    Raises:
        CheckpointError: if what is there cannot have been left by a save; then nothing is touched.
    """
    complete = folder / COMPLETE_NAME
    if not os.path.lexists(complete):
        return
    if complete.is_symlink() or not complete.is_dir():
        raise CheckpointError(f"{complete} is no folder")
    if os.path.lexists(complete / MANIFEST_NAME):  # It is moved last: without it everything is in place.
        manifest = _check_ways(complete, folder)
        _remove_files_of_before(folder, manifest)
        for name in (*manifest, MANIFEST_NAME):
            source = complete / name
            if os.path.isfile(source):  # else it was moved before an interruption
                place = folder / name
                place.parent.mkdir(parents=True, exist_ok=True)
                os.replace(source, place)
        changed_folders = {folder, *[(folder / name).parent for name in manifest]}
        for changed in filter(os.path.isdir, changed_folders):
            sync_to_disk(changed)
    shutil.rmtree(complete, ignore_errors=True)


def _remove_files_of_before(folder: Path, manifest: Manifest) -> None:
    """Remove the files of the checkpoint that is being replaced, as far as they can be known, unless they are new."""
    with contextlib.suppress(CheckpointError):
        old_names = read_manifest(folder).keys() - manifest.keys()
        for place in _places(folder, old_names):
            if os.path.isfile(place):
                place.unlink()


# Loading


@contextlib.contextmanager
def verifying(folder: Path) -> Iterator[Manifest]:
    """Yield the manifest of `folder` while threads check every file; the block ends when they have.

    So the files can be read at the same time. Nothing may be done with their content before the block has ended.

    Raises:
        CheckpointError: naming the first file that is not as the manifest says, also where the block raises something.
    """
    manifest = read_manifest(folder)
    places = _places(folder, manifest)
    for place in places:
        if not os.path.isfile(place):
            raise CheckpointError(f"{place} is missing")
    with ThreadPoolExecutor() as threads:
        descriptions = threads.map(describe, places)
        try:
            yield manifest
        finally:
            _compare(places, descriptions, manifest.values())


def _compare(places: list[Path], descriptions: Iterator[Description], expected: Iterable[Description]) -> None:
    for place, wanted in zip(places, expected, strict=True):
        try:
            found = next(descriptions)
        except OSError as error:
            raise CheckpointError(f"{place} cannot be read: {error}") from error
        if found != wanted:
            raise CheckpointError(f"{place} is not what was saved: it was cut short or changed")


def finish_and_verify(folder: Path) -> Manifest:
    """Finish a save that was interrupted, check every file, and return the manifest.

    Raises:
        CheckpointError: naming the first file that is not as the manifest says.
    """
    finish_interrupted_save(folder)
    with verifying(folder) as manifest:
        return manifest


def holds_checkpoint(folder: Path) -> bool:
    """True where a save to `folder` has been completed, whatever became of its files since."""
    return any(os.path.lexists(place / MANIFEST_NAME) for place in (folder, folder / COMPLETE_NAME))


# Several checkpoints side by side


def numbered(parent: Path, prefix: str = "checkpoint_") -> list[Path]:
    """The folders in `parent` whose names are `prefix` and a number, the highest number first; no links."""
    if not parent.is_dir():
        return []
    pattern = re.compile(re.escape(prefix) + "[0-9]+")
    found = [path for path in parent.iterdir() if pattern.fullmatch(path.name)]
    folders = [path for path in found if path.is_dir() and not path.is_symlink()]
    return sorted(folders, key=lambda path: _number(path, prefix), reverse=True)


def _number(folder: Path, prefix: str) -> int:
    return int(folder.name.removeprefix(prefix))


def choose_newest(parent: Path, prefix: str = "checkpoint_") -> Path:
    """Choose the whole checkpoint with the highest number, and verify it.

    An interrupted save is finished first. Damaged checkpoints with higher numbers are logged, and renamed.

    Raises:
        CheckpointVersionError: if the one to continue from is of another format.
        CheckpointError: if none is whole; then all stay as they are.
    """
    damaged = []
    for folder in numbered(parent, prefix):
        try:
            finish_and_verify(folder)
        except CheckpointVersionError:
            raise
        except CheckpointError as error:
            logger.warning("skipping a checkpoint: %s", error)
            damaged.append(folder)
            continue
        logger.info("resuming from %s", folder)
        for other in damaged:  # The run will need their numbers again.
            with contextlib.suppress(OSError):
                other.rename(f"{other}.damaged-{uuid.uuid4().hex[:8]}")
        return folder
    raise CheckpointError(f"there is no complete checkpoint in {parent}")


def remove_old_checkpoints(just_written: Path, limit: int, prefix: str = "checkpoint_") -> None:
    """Remove complete checkpoints beside `just_written` until at most `limit`, and at least that one, are left.

    Those of higher numbers are of an earlier run, so they count as older than those of lower numbers.

    Raises:
        OSError: if one cannot be removed.
    """
    written = _number(just_written, prefix)
    others = [path for path in numbered(just_written.parent, prefix) if path.name != just_written.name]
    complete = [path for path in others if holds_checkpoint(path)]
    newest_first = [path for path in complete if _number(path, prefix) < written]
    newest_first += [path for path in complete if _number(path, prefix) > written]
    for old in newest_first[max(limit - 1, 0) :]:
        remove_folder(old)
