"""Checkpoint folders: whether one is whole can be seen from its files, and none is trusted before all were checked.

Every process that saves writes a part. The writer's, which is rank 0's (or that of the first process of each machine),
has what all ranks share: weights, optimizers and so on. The others' have what each has of its own, such as the states
of its random generators. Nobody waits for anybody: not all ranks need to save, and they need not do it at one time.

    .c.draft_0/             a part that is being written
    .c.part_1/              a part of rank 1 that is complete, while there is no checkpoint yet that it belongs to
    c/manifest.json         the writer's part is complete: from now on there is a checkpoint
    c/manifest_1.json       rank 1's part is in the folder too; whoever of rank 0 and rank 1 comes last has moved it

A manifest has the format's version, the size and checksum of each file of a part, and a name of the save that every
rank finds by itself. Parts of other saves count for nothing.

**Whole** is a checkpoint with the parts of all ranks that the writer's manifest expects: those whose parts were there
before its own, and those that took part in the save before. So one that rank 0 saves alone is whole, and where a rank
is killed in a save of all ranks, this one is not, and the one before is the newest whole one. The writer cannot see the
future: if in the first save of a run it was done before the others had begun, it expects nobody, and if they are killed
then, their part is missing in a whole checkpoint. Loading says so; `all_ranks=True` waits for them.

Where the folder exists already, with an older checkpoint or files of the user, the draft moves into it, as `.complete`.
That is the moment in which the checkpoint comes to be. Its files are then moved to their places, and the next save or
load finishes that if it was interrupted. An older checkpoint stays as `.previous` until one of them finds that the
newer one is whole. Nobody waits for the disk: after a power failure the newest checkpoint may be damaged, and the one
before it is taken.

A folder may come from anywhere. So only files are opened or moved that were found by walking through it, which follows
no link; a name in a manifest says which of these belong to the checkpoint.
"""

import contextlib
import glob
import json
import logging
import os
import re
import shutil
import uuid
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

# Increase it when the content of the files changes so that older code could not resume from newer files, or newer code
# from older ones.
FORMAT_VERSION = 9
MANIFEST_NAME = "manifest.json"  # the writer's
MANIFEST_OF_RANK = "manifest_{}.json"
COMPLETE_NAME = ".complete"
PREVIOUS_NAME = ".previous"
_BYTES_IN_BLOCK = 2**18
_FACTOR = 1_000_003  # odd, so that no difference is lost
_KINDS_IN_MANIFEST = {"save": str, "rank": int, "world_size": int, "expects": list, "files": dict}

Description = dict[str, int]  # the size of a file and its checksum


class CheckpointError(ValueError):
    """A checkpoint is not there, incomplete, damaged, forged, of another format, or was not written by `save_state`."""


# The manifests


@dataclass
class Manifest:
    """The content of a checkpoint, as the manifests of its parts list it. No file has been checked yet.

    Attributes:
        save: the name of the save.
        world_size: the processes of the run, whether they saved or not.
        ranks: those whose parts are there, the writer first.
        missing: the ranks whose parts are expected, and not there.
        files: the description of each file of all parts, by its name in the folder.
    """

    save: str
    world_size: int
    ranks: list[int]
    missing: list[int]
    files: dict[str, Description]


def describe(path: Path) -> Description:
    """The size of a file in bytes, and its checksum: a polynomial of the sums of its blocks, as numbers of 8 bytes.

    What lies behind the last whole block, which may be all of a file, is one number more: its CRC-32. A mapped file is
    summed without a copy and in one call, where a CRC-32 can take longer than all of the save.
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


def _files_in(folder: Path) -> dict[str, Path]:
    """The files in `folder` and its subfolders by their names in it. Links are not followed, and are none."""
    files = {}
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            files[path.relative_to(folder).as_posix()] = path
    return files


def read_manifest(folder: Path) -> Manifest:
    """What the checkpoint in `folder` holds.

    Raises:
        CheckpointError: if there is none, or a manifest is damaged or of another format.
    """
    if not folder.exists():
        raise CheckpointError(f"Tried to find {folder} but folder does not exist")
    of_writer = _read_part(folder / MANIFEST_NAME)
    ranks = [of_writer["rank"]]
    files = of_writer["files"]
    for path in sorted(folder.glob(MANIFEST_OF_RANK.format("*"))):
        part = _read_part(path)
        if part["save"] == of_writer["save"]:
            ranks.append(part["rank"])
            files = part["files"] | files
    missing = [rank for rank in of_writer["expects"] if rank not in ranks]
    return Manifest(of_writer["save"], of_writer["world_size"], ranks, missing, files)


def _read_part(path: Path) -> dict[str, Any]:
    """The manifest of one part, with the keys that `Part.publish` writes."""
    if path.is_symlink() or not path.is_file():
        raise CheckpointError(
            f"{path.parent} holds no {path.name}: it is no checkpoint of save_state, or an unfinished one"
        )
    try:
        content = json.loads(path.read_bytes())
        version = content["format_version"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    if version != FORMAT_VERSION:
        raise CheckpointError(f"{path.parent} is a checkpoint in format {version!r}; this code reads {FORMAT_VERSION}")
    for key, kind in _KINDS_IN_MANIFEST.items():
        if not isinstance(content.get(key), kind):
            raise CheckpointError(f"{path} is damaged: {key!r} is no {kind.__name__}")
    return content


def is_whole(folder: Path, run: str | None = None) -> bool:
    """True if there is a checkpoint in `folder` with the parts of all ranks that it expects.

    Args:
        run: a run in which nobody is saving now. What it has saved gets no further parts, so it counts as whole.
    """
    try:
        manifest = read_manifest(folder)
    except CheckpointError:
        return False
    return not manifest.missing or manifest.save.startswith(f"{run}-")


def verify(folder: Path) -> None:
    """Compare every file of the checkpoint in `folder` with its description.

    Raises:
        CheckpointError: naming the first file that is not as the manifest says.
    """
    manifest = read_manifest(folder)
    files = _files_in(folder)
    for name, description in manifest.files.items():
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


@dataclass
class Part:
    """What one process writes in one save.

    Attributes:
        folder: of the checkpoint.
        save: the name of the save.
        is_writers: True for the part that makes the checkpoint.
    """

    folder: Path
    save: str
    rank: int
    world_size: int
    is_writers: bool

    @property
    def draft(self) -> Path:
        """The folder in which the part is written."""
        return _beside(self.folder, f"draft_{self.rank}")

    @property
    def waiting(self) -> Path:
        """The folder in which a complete part waits for the writer's."""
        return _beside(self.folder, f"part_{self.rank}")

    def start(self) -> None:
        """Make an empty draft.

        Raises:
            CheckpointError: if an earlier save was interrupted and cannot be finished.
            OSError: if the draft cannot be made.
        """
        if self.is_writers:
            finish_interrupted_save(self.folder)
        self.discard()
        self.draft.mkdir(parents=True)

    def discard(self) -> None:
        """Remove what this process has written and what is not in the folder."""
        remove(self.draft)
        remove(self.waiting)

    def publish(self, expected: set[int]) -> set[int]:
        """Make what is in the draft a part of the checkpoint in the folder. Other files there stay.

        Args:
            expected: the ranks that the writer expects to save too, beside those whose parts wait.

        Returns:
            all that the writer expects, itself included.

        Raises:
            CheckpointError: if there is a link in the draft, which no load would follow, or something in the folder is
                in the way. The checkpoint that was there before still is.
            OSError: if something cannot be written or renamed; likewise.
        """
        waiting = _waiting_parts(self.folder, self.save)
        expects = {self.rank, *expected, *waiting}
        self._write_manifest(sorted(expects))
        if not self.is_writers:
            self.draft.rename(self.waiting)
            _take_in_parts(self.folder)
            return expects
        if not self.folder.exists():
            with contextlib.suppress(OSError):  # made meanwhile, and not empty
                self.draft.rename(self.folder)
        if self.draft.exists():
            _files_and_places(self.draft, self.folder)  # raises where something is in the way
            if expects != {self.rank, *waiting}:
                _keep_as_previous(self.folder)
            self.draft.rename(self.folder / COMPLETE_NAME)
        finish_interrupted_save(self.folder)
        return expects

    def _write_manifest(self, expects: list[int]) -> None:
        links = [path for path in self.draft.rglob("*") if path.is_symlink()]
        if links:
            raise CheckpointError(f"{links[0]} is a symbolic link: a checkpoint holds files only")
        content = {
            "format_version": FORMAT_VERSION,
            "save": self.save,
            "rank": self.rank,
            "world_size": self.world_size,
            "expects": expects,
            "files": {name: describe(path) for name, path in _files_in(self.draft).items()},
        }
        name = MANIFEST_NAME if self.is_writers else MANIFEST_OF_RANK.format(self.rank)
        (self.draft / name).write_text(json.dumps(content, indent=1))


def _beside(folder: Path, name: str) -> Path:
    """A hidden path beside `folder`; inside of it, where a file from beside could not be renamed into it."""
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


def _waiting_parts(folder: Path, save: str) -> dict[int, Path]:
    """The complete parts of a save that are not in its folder yet, by their ranks."""
    pattern = _beside(folder, "part_")
    found = {}
    for path in pattern.parent.glob(f"{glob.escape(pattern.name)}*"):
        name = MANIFEST_OF_RANK.format(path.name.rpartition("_")[2])
        with contextlib.suppress(CheckpointError, OSError):  # no part, or its own process is moving it
            part = _read_part(path / name)
            if part["save"] == save and not path.is_symlink():
                found[part["rank"]] = path
    return found


def _take_in_parts(folder: Path) -> None:
    """Move the waiting parts of the checkpoint that is in `folder` to their places.

    The writer and the process whose part it is may do so at the same time. Whoever comes too late for a file stops.

    Raises:
        CheckpointError: if something is in the way.
    """
    try:
        of_writer = _read_part(folder / MANIFEST_NAME)
    except CheckpointError:
        return
    for part in _waiting_parts(folder, of_writer["save"]).values():
        with contextlib.suppress(FileNotFoundError):
            _move(part, folder, unless_in=of_writer["files"])


def finish_interrupted_save(folder: Path) -> None:
    """Move the files of complete drafts that belong into `folder` to their places.

    Raises:
        CheckpointError: if what is there cannot have been left by a save; then nothing is touched.
    """
    complete = folder / COMPLETE_NAME
    previous = folder / PREVIOUS_NAME
    for path in (complete, previous):
        if path.is_symlink() or path.is_file():
            raise CheckpointError(f"{path} is no folder")
    if complete.is_dir():
        _move(complete, folder)
    _take_in_parts(folder)
    if previous.is_dir() and is_whole(folder):
        shutil.rmtree(previous)


def _move(draft: Path, folder: Path, unless_in: Collection[str] = ()) -> None:
    """Move the files of `draft` to their places in `folder`, and remove it with those whose names are `unless_in`."""
    for file, place in _files_and_places(draft, folder):
        if file.relative_to(draft).as_posix() not in unless_in:
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(file, place)
    shutil.rmtree(draft)


def _files_and_places(draft: Path, folder: Path) -> list[tuple[Path, Path]]:
    """Each file in `draft` with its place in `folder`, the manifest last.

    Raises:
        CheckpointError: if one of the places is a folder, or behind a link.
    """
    files_and_places = []
    files = _files_in(draft)
    for name in sorted(files, key=_is_manifest):
        place = folder / name
        if place.is_dir() or place.parent.resolve() != folder.resolve() / Path(name).parent:
            raise CheckpointError(f"{place} is a folder or behind a link, where a file is to be")
        files_and_places.append((files[name], place))
    return files_and_places


def _is_manifest(name: str) -> bool:
    return re.fullmatch(r"manifest(_[0-9]+)?\.json", name) is not None


def _keep_as_previous(folder: Path) -> None:
    """Let the checkpoint in `folder`, if it is whole, be in `.previous` too: the same files under second names."""
    if not is_whole(folder):
        return
    files_of_checkpoint = read_manifest(folder).files
    draft = folder / f"{PREVIOUS_NAME}.draft"
    remove(draft)
    for name, file in _files_in(folder).items():
        if name in files_of_checkpoint or _is_manifest(name):
            place = draft / name
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(file, place)
            except OSError:  # a disk without hard links
                shutil.copyfile(file, place)
    remove(folder / PREVIOUS_NAME)
    draft.rename(folder / PREVIOUS_NAME)


# Several checkpoints side by side


def numbered(parent: Path, prefix: str = "checkpoint_") -> list[Path]:
    """The folders in `parent` whose names are `prefix` and a number, the highest number first; no links."""
    if not parent.is_dir():
        return []
    pattern = re.compile(re.escape(prefix) + "[0-9]+")
    found = [path for path in parent.iterdir() if pattern.fullmatch(path.name)]
    folders = [path for path in found if path.is_dir() and not path.is_symlink()]
    return sorted(folders, key=lambda path: int(path.name.removeprefix(prefix)), reverse=True)


def choose_newest(parent: Path, prefix: str = "checkpoint_", run: str | None = None) -> Path:
    """Choose the whole checkpoint with the highest number, and verify it; or else the highest of those lacking parts.

    An interrupted save is finished first. What was passed over is logged, and renamed; drafts that a killed run has
    left are removed.

    Args:
        run: of `is_whole`.

    Raises:
        CheckpointError: if all are damaged; then all stay as they are.
    """
    found = numbered(parent, prefix)
    incomplete = []
    for folder in found:
        try:
            finish_and_verify(folder)
        except CheckpointError as error:
            logger.warning("skipping a checkpoint: %s", error)
            continue
        if is_whole(folder, run):
            chosen = folder
            break
        missing = read_manifest(folder).missing
        logger.warning("skipping a checkpoint: in %s the parts of ranks %s are missing", folder, missing)
        incomplete.append(folder)
    else:
        if not incomplete:
            raise CheckpointError(f"there is no complete checkpoint in {parent}")
        chosen = incomplete[0]
    logger.info("resuming from %s", chosen)
    for other in found[: found.index(chosen)]:  # The run will need their numbers again.
        with contextlib.suppress(OSError):
            other.rename(f"{other}.damaged-{uuid.uuid4().hex[:8]}")
    for left_over in parent.glob(f".{glob.escape(prefix)}*.draft*"):
        remove(left_over)
    return chosen


def remove_old_checkpoints(just_written: Path, limit: int) -> None:
    """Remove checkpoints beside `just_written` until at most `limit`, and at least that one, are left.

    As long as none of these is whole, one more is left that is. Those of higher numbers are of an earlier run, so they
    count as older than those of lower numbers.

    Raises:
        OSError: if one cannot be removed.
    """
    complete = [path for path in numbered(just_written.parent) if (path / MANIFEST_NAME).exists()]
    from_just_written = complete[complete.index(just_written) :] + complete[: complete.index(just_written)]
    kept = from_just_written[: max(limit, 1)]
    for old in from_just_written[len(kept) :]:
        if any(is_whole(path) for path in kept):
            remove_folder(old)
        else:
            kept.append(old)


def remove_folder(folder: Path) -> None:
    """Remove `folder`. It gives up its name first: half a folder never bears the name of a whole one.

    Raises:
        OSError: if it cannot be renamed or removed.
    """
    doomed = folder.with_name(f".{folder.name}.draft")
    remove(doomed)
    folder.rename(doomed)
    remove(doomed)
