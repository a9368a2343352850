"""Checkpoint folders: each is there as a whole or not at all, and none is trusted before all of it has been checked.

A folder holds files and a manifest with the format's version and the size and checksums of every file. (They find
damage, not forgery: whoever changes a file can change them too.) A save writes all files into a draft within the
folder; renaming the draft to `.complete` is the one moment in which the checkpoint comes to be. Its files are then
moved to their places, and the next save or load finishes that if it was interrupted.

A folder may come from anywhere. So a name in a manifest is believed only if it is that of a regular file within the
folder, reached without a symbolic link, and nothing is touched before all of a manifest has been checked. (There
is no protection against somebody who changes the folder while it is being read.)
"""

import contextlib
import json
import logging
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from common.files import forget_draft, is_draft, new_draft, remove_folder, sync_to_disk

logger = logging.getLogger(__name__)

# Increase it when the content of the files changes so that older code could not resume from newer files, or newer code
# from older ones. Version 1 had no version in its manifest; version 2 held the position of every loader; version 3 had
# the SHA-256 of each file, which took as long to compute as the file to write.
FORMAT_VERSION = 4
MANIFEST_NAME = "manifest.json"
COMPLETE_NAME = ".complete"
# Some 100,000 files: more than a save writes, and less than would fill the memory.
_LARGEST_MANIFEST_BYTES = 2**24
# A file has a checksum for each block of so many bytes, so that several threads can compute them.
BLOCK_BYTES = 2**25
_BYTES_READ_AT_ONCE = 2**20
_MOST_THREADS = 4


class CheckpointError(ValueError):
    """A checkpoint is not there, incomplete, damaged, forged, of another format, or was not written by `save_state`."""


class CheckpointVersionError(CheckpointError):
    """A checkpoint was saved in an older or a newer format."""


@dataclass(frozen=True)
class FileDigest:
    """A file's description: its size and, one after the other, the CRC-32 of each block in eight hexadecimal digits."""

    bytes: int
    crc32: str


Manifest = dict[str, FileDigest]


class _Running(NamedTuple):
    """The digest of a file that is being computed, and the flushing of the file, if it is to be flushed."""

    bytes: int
    crc32_of_blocks: list[Future[int]]
    flushing: Future[None] | None


class DigestThreads:
    """Threads that compute the digests of files, and flush them to the disk, while other files are still being written.

    Neither needs Python's lock: what the threads do costs the process that writes little where a core is free.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_MOST_THREADS)
        self._running: dict[Path, _Running] = {}

    def __enter__(self) -> "DigestThreads":
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    def begin(self, path: Path, flush: bool) -> None:
        """Begin with the file `path`, unless that has been done before. Nobody may change it from now on.

        Raises:
            OSError: if it is not there.
        """
        if path in self._running:
            return
        size = path.stat().st_size
        flushing = self._threads.submit(sync_to_disk, path) if flush else None
        blocks = [self._threads.submit(_crc32_of_block, path, begin) for begin in range(0, size, BLOCK_BYTES)]
        self._running[path] = _Running(size, blocks, flushing)

    def digest(self, path: Path) -> FileDigest:
        """Wait for the file `path`, which has been begun.

        Raises:
            OSError: if it cannot be read or flushed.
        """
        running = self._running[path]
        if running.flushing is not None:
            running.flushing.result()
        crc32 = "".join(f"{block.result():08x}" for block in running.crc32_of_blocks)
        return FileDigest(running.bytes, crc32)


def _crc32_of_block(path: Path, begin: int) -> int:
    crc32 = fastest_crc32()
    value = 0
    buffer = memoryview(bytearray(_BYTES_READ_AT_ONCE))
    # Reading costs a copy that mapping would not. But where a mapped disk fails, the system ends the process.
    with path.open("rb", buffering=0) as file:
        file.seek(begin)
        for _ in range(BLOCK_BYTES // _BYTES_READ_AT_ONCE):
            count = file.readinto(buffer)
            value = crc32(buffer[:count], value)
    return value


def fastest_crc32() -> Callable[[Any, int], int]:
    """The CRC-32 of Intel's ISA-L, which is some five times as fast as zlib's; without its package zlib's."""
    try:
        from isal.isal_zlib import crc32
    except ImportError:
        from zlib import crc32
    return crc32


# The manifest


def write_manifest(folder: Path, digests: DigestThreads | None = None) -> None:
    """Write the digests of all files of `folder` into its manifest, and flush everything to the disk.

    Args:
        digests: threads that have begun with some of the files.

    Raises:
        CheckpointError: if there is something in the folder that `finish_and_verify` would refuse.
    """
    if digests is None:
        with DigestThreads() as digests:
            write_manifest(folder, digests)
        return
    manifest_path = folder / MANIFEST_NAME
    paths = []
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise CheckpointError(f"{path} is a symbolic link: a checkpoint holds files only")
        if path.is_dir():
            sync_to_disk(path)
        if path.is_file() and path != manifest_path:
            _check_name(path.relative_to(folder).as_posix(), folder)
            digests.begin(path, flush=True)
            paths.append(path)
    files = {path.relative_to(folder).as_posix(): asdict(digests.digest(path)) for path in paths}
    manifest_path.write_text(json.dumps({"format_version": FORMAT_VERSION, "files": files}, indent=1))
    sync_to_disk(manifest_path)
    sync_to_disk(folder)
    sync_to_disk(folder.parent)


def read_manifest(folder: Path) -> Manifest | None:
    """The files of `folder`, as its manifest lists them; None if it has no manifest.

    Raises:
        CheckpointVersionError: if it is of another format.
        CheckpointError: if it is damaged or forged.
    """
    path = folder / MANIFEST_NAME
    status = _regular_file(folder, MANIFEST_NAME)
    if status is None:
        return None
    if status.st_size > _LARGEST_MANIFEST_BYTES:
        raise CheckpointError(f"{path} is damaged: {status.st_size} bytes are too many")
    try:
        content = json.loads(path.read_bytes().decode(), object_pairs_hook=_dict_without_duplicates)
    except (ValueError, RecursionError, OSError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    _check_version(content, folder)
    return _parse_manifest(content, path)


def _dict_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("it has a key twice")
    return found


def _check_version(content: Any, folder: Path) -> None:
    if not isinstance(content, dict):
        raise CheckpointError(f"{folder / MANIFEST_NAME} is damaged: it is no JSON object")
    is_first_version = "format_version" not in content and all(map(_is_of_version_1, content.values()))
    version = 1 if is_first_version else content.get("format_version")
    if type(version) is not int:
        raise CheckpointError(f"{folder / MANIFEST_NAME} is damaged: its format_version is no whole number")
    if version != FORMAT_VERSION:
        age = "an older" if version < FORMAT_VERSION else "a newer"
        raise CheckpointVersionError(
            f"{folder} is a checkpoint in {age} format, version {version}; this code reads version {FORMAT_VERSION}"
        )


def _parse_manifest(content: dict[str, Any], path: Path) -> Manifest:
    files = content.get("files")
    if content.keys() != {"format_version", "files"} or not isinstance(files, dict):
        raise CheckpointError(f"{path} is damaged: it must hold format_version and files")
    manifest = {}
    for name, entry in files.items():
        _check_name(name, path.parent)
        if not _is_digest(entry):
            raise CheckpointError(f"{path} is damaged: {name!r} has no size and checksums")
        manifest[name] = FileDigest(**entry)
    for name in manifest:
        for parent in PurePath(name).parents:
            if parent.as_posix() in manifest:
                raise CheckpointError(f"{path} is damaged: {parent} is a file and a folder")
    return manifest


def _check_name(name: str, folder: Path) -> None:
    """Raise a CheckpointError unless `name` is a relative path that can only lead to a file of a checkpoint."""
    path = PurePath(name)
    # A drive, a backslash or a colon has a meaning on Windows; there `as_posix` changes such a name.
    is_plain = path.as_posix() == name and not path.is_absolute() and not path.drive and name.isprintable()
    first = path.parts[0].lower() if path.parts else ""  # some file systems ignore case
    is_reserved = first in (COMPLETE_NAME, MANIFEST_NAME) or is_draft(Path(first))
    if not is_plain or ".." in path.parts or name == "." or is_reserved:
        raise CheckpointError(f"{folder / MANIFEST_NAME} is damaged: {name!r} is no name of a file in a checkpoint")


def _is_of_version_1(entry: Any) -> bool:
    return isinstance(entry, dict) and entry.keys() == {"bytes", "sha256"}


def _is_digest(entry: Any) -> bool:
    if not isinstance(entry, dict) or entry.keys() != {"bytes", "crc32"}:
        return False
    size = entry["bytes"]
    crc32 = entry["crc32"]
    if type(size) is not int or size < 0 or not isinstance(crc32, str):
        return False
    blocks = -(-size // BLOCK_BYTES)
    return len(crc32) == 8 * blocks and re.fullmatch("[0-9a-f]*", crc32) is not None


# Files within a folder, without following links


def _regular_file(folder: Path, name: str) -> os.stat_result | None:
    """The status of the file `name` in `folder`, or None if it is not there.

    Raises:
        CheckpointError: if it is no regular file, or if what leads to it is no real folder.
    """
    status = _status_within(folder, name)
    if status is not None and not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{folder / name} is no regular file")
    return status


def _status_within(folder: Path, name: str) -> os.stat_result | None:
    """The status of `name` in `folder`, whatever it is, or None if it is not there.

    Raises:
        CheckpointError: if what leads to it is no real folder.
    """
    *parents, _ = PurePath(name).parts
    place = folder
    for parent in parents:
        place = place / parent
        status = _status(place)
        if status is None:
            return None
        if not stat.S_ISDIR(status.st_mode):
            raise CheckpointError(f"{place} is no folder")
    return _status(folder / name)


def _status(path: Path) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:  # a name that is too long, or that the file system cannot have
        raise CheckpointError(f"{path} cannot be read: {error}") from error


class _ExpectedFile(NamedTuple):
    """A file that a manifest names, and the folder in which it is to be."""

    folder: Path
    name: str
    digest: FileDigest

    @property
    def path(self) -> Path:
        return self.folder / self.name


def _check_files(expected: list[_ExpectedFile]) -> None:
    """Raise a CheckpointError that names the first file that is not there or is not as expected."""
    with DigestThreads() as digests:
        for file in expected:
            status = _regular_file(file.folder, file.name)
            if status is None:
                raise CheckpointError(f"{file.path} is missing")
            if status.st_size != file.digest.bytes:
                raise _was_changed(file.path)
            with _named_where_unreadable(file.path):
                digests.begin(file.path, flush=False)
        for file in expected:
            with _named_where_unreadable(file.path):
                found = digests.digest(file.path)
            if found != file.digest:
                raise _was_changed(file.path)


def _was_changed(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} is not what was saved: it was cut short or changed")


@contextlib.contextmanager
def _named_where_unreadable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


# Saving


def start_save(folder: Path) -> Path:
    """Make an empty draft in `folder`, for the files of a checkpoint, and return its path.

    Raises:
        CheckpointError: if an earlier save was interrupted and cannot be finished.
        OSError: if the draft cannot be made.
    """
    finish_interrupted_save(folder)
    folder.mkdir(parents=True, exist_ok=True)
    draft = new_draft(folder)
    draft.mkdir()
    return draft


def commit_save(draft: Path, folder: Path, digests: DigestThreads | None = None) -> None:
    """Make what is in `draft` the checkpoint in `folder`. The files of the one before go; other files stay.

    Args:
        digests: threads that have begun with some of the files.

    Raises:
        CheckpointError: if `folder` or `draft` holds something that cannot be in a checkpoint. The checkpoint that was
            there before then still is.
        OSError: if something could not be written; likewise.
    """
    write_manifest(draft, digests)
    manifest = _manifest_of(draft)
    _check_places(folder, manifest)
    os.rename(draft, folder / COMPLETE_NAME)
    forget_draft(draft)
    _move_into_place(folder, manifest)


def finish_interrupted_save(folder: Path) -> None:
    """If a save was interrupted while it moved a complete draft into place, finish that; otherwise do nothing.

    Raises:
        CheckpointError: if what was completed is damaged or forged; then nothing is touched.
    """
    complete = folder / COMPLETE_NAME
    status = _status(complete)
    if status is None:
        return
    if not stat.S_ISDIR(status.st_mode):
        raise CheckpointError(f"{complete} is no folder")
    manifest = read_manifest(complete)
    if manifest is None:  # The manifest is moved last, so everything is in place.
        shutil.rmtree(complete, ignore_errors=True)
        return
    _check_places(folder, manifest)
    expected = []
    for name, digest in manifest.items():
        was_moved = _regular_file(complete, name) is None
        expected.append(_ExpectedFile(folder if was_moved else complete, name, digest))
    _check_files(expected)
    _move_into_place(folder, manifest)


def _check_places(folder: Path, manifest: Manifest) -> None:
    """Raise a CheckpointError unless every file can be moved to its place without leaving the folder."""
    for name in (*manifest, MANIFEST_NAME):
        status = _status_within(folder, name)
        if status is not None and stat.S_ISDIR(status.st_mode):
            raise CheckpointError(f"{folder / name} is a folder, where a file is to be")


def _move_into_place(folder: Path, manifest: Manifest) -> None:
    complete = folder / COMPLETE_NAME
    _remove_files(folder, _names_in_readable_manifest(folder) - manifest.keys())
    folders = {folder}
    for name in (*manifest, MANIFEST_NAME):
        place = folder / name
        folders.add(place.parent)
        with contextlib.suppress(FileNotFoundError):  # if it was moved before an interruption
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(complete / name, place)
    for changed in folders:
        sync_to_disk(changed)
    shutil.rmtree(complete, ignore_errors=True)


def _names_in_readable_manifest(folder: Path) -> set[str]:
    """The files of the checkpoint that is being replaced, as far as they can be known."""
    try:
        return set(read_manifest(folder) or ())
    except CheckpointError:
        return set()


def _remove_files(folder: Path, names: Collection[str]) -> None:
    for name in names:
        with contextlib.suppress(CheckpointError):  # It is no longer the file that it was.
            if _regular_file(folder, name) is not None:
                (folder / name).unlink(missing_ok=True)


# Loading


def finish_and_verify(folder: Path) -> Manifest:
    """Finish a save that was interrupted, check every file, and return the manifest.

    Raises:
        CheckpointError: naming the first file that is not as the manifest says.
    """
    finish_interrupted_save(folder)
    manifest = _manifest_of(folder)
    _check_files([_ExpectedFile(folder, name, digest) for name, digest in manifest.items()])
    return manifest


def _manifest_of(folder: Path) -> Manifest:
    if _status(folder) is None:
        raise CheckpointError(f"Tried to find {folder} but folder does not exist")
    manifest = read_manifest(folder)
    if manifest is None:
        raise CheckpointError(
            f"{folder} holds no {MANIFEST_NAME}: it is no checkpoint of save_state, or an unfinished one"
        )
    return manifest


def holds_checkpoint(folder: Path) -> bool:
    """True where a save to `folder` has been completed, whatever became of its files since."""
    return any(_status(place / MANIFEST_NAME) is not None for place in (folder, folder / COMPLETE_NAME))


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


def holds_something(folder: Path) -> bool:
    """True where more is in `folder` than the draft of a save that never ended."""
    return any(not is_draft(path) for path in folder.iterdir())


def has_checkpoints(parent: Path, prefix: str = "checkpoint_") -> bool:
    """True where `parent` holds a numbered checkpoint, whole or damaged, that has not been set aside as damaged."""
    return any(holds_something(folder) for folder in numbered(parent, prefix))


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
            if holds_something(folder):
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
    complete = [path for path in others if _status(path / MANIFEST_NAME) is not None]
    newest_first = [path for path in complete if _number(path, prefix) < written]
    newest_first += [path for path in complete if _number(path, prefix) > written]
    for old in newest_first[max(limit - 1, 0) :]:
        remove_folder(old)
