"""The manifests of a checkpoint: which files belong to it, and whether they are undamaged.

Each part of a checkpoint has a manifest, which is written last. `manifest.json` belongs to the main part, and
`manifest_R.json` to the part of rank R. The manifest of rank 0 in a run of two ranks:

    {"format_version": 16, "save": "run-5", "rank": 0, "world_size": 2,
     "files": {"model.safetensors": {"bytes": 300, "checksum": 1846218750}, …}}

The save is the id that save_ids.py gives. A part with another id than the main part is of another save, and ignored.
"""

import json
import re
import zlib
from array import array
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import torch

# A checkpoint of another version is refused. The version increases when older code could not resume from newer files.
FORMAT_VERSION = 16
MANIFEST_NAME = "manifest.json"
RANK_MANIFEST_NAME = "manifest_{}.json"
_BYTES_IN_PAGE = 2**12

Description = dict[str, int]  # It has the keys "bytes" and "checksum", see `describe`.


class CheckpointError(ValueError):
    """A checkpoint is not there, incomplete, damaged, forged, of another format, or was not written by `save_state`."""


class FormatError(CheckpointError):
    """A manifest is of another version of the format."""


@dataclass(frozen=True)
class Manifest:
    """The manifest of one part; `files` has the description of each file by its name in the folder."""

    save: str
    rank: int
    world_size: int
    files: dict[str, Description]


def is_manifest(name: str) -> bool:
    """True for the name of a main manifest or of a rank's."""
    return re.fullmatch(r"manifest(_[0-9]+)?\.json", name) is not None


def write_manifest(manifest: Manifest, path: Path) -> None:
    path.write_text(json.dumps({"format_version": FORMAT_VERSION, **asdict(manifest)}, indent=1))


def read_manifest(path: Path) -> Manifest:
    """The manifest in the file `path`.

    Raises:
        CheckpointError: if there is no such file, or it is damaged.
        FormatError: if it is of another format.
    """
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
        raise FormatError(f"{path.parent} is a checkpoint in format {version!r}; this code reads {FORMAT_VERSION}")
    for key, expected_type in {"save": str, "rank": int, "world_size": int, "files": dict}.items():
        if not isinstance(content.get(key), expected_type):
            raise CheckpointError(f"{path} is damaged: {key!r} is no {expected_type.__name__}")
    return Manifest(content["save"], content["rank"], content["world_size"], content["files"])


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on the disk. No file has been verified yet.

    Attributes:
        manifests: of the parts that are there, that of the main part first.
    """

    folder: Path
    manifests: list[Manifest]

    @property
    def world_size(self) -> int:
        """The number of processes of the run, whether they saved or not."""
        return self.manifests[0].world_size

    @cached_property
    def files(self) -> set[str]:
        """The names of all files of the checkpoint."""
        return {name for manifest in self.manifests for name in manifest.files}

    def require_file(self, name: str) -> Path:
        """The path of a file of the checkpoint. Without such a file, a CheckpointError."""
        path = self.folder / name
        if name not in self.files or path.is_symlink() or not path.is_file():
            raise CheckpointError(f"{name} is not among the files of the checkpoint in {self.folder}")
        return path


def read_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in `folder`, according to its manifests.

    Raises:
        CheckpointError: if there is no main manifest, it is of another format, or a manifest is damaged.
    """
    if not folder.exists():
        raise CheckpointError(f"Tried to find {folder} but folder does not exist")
    main = read_manifest(folder / MANIFEST_NAME)
    manifests = [main]
    for path in sorted(folder.glob(RANK_MANIFEST_NAME.format("*"))):
        if not is_manifest(path.name):
            continue
        try:
            manifest = read_manifest(path)
        except FormatError:
            continue  # An older save into this folder has left it.
        if manifest.save == main.save:
            manifests.append(manifest)
    return Checkpoint(folder, manifests)


def verify(folder: Path) -> None:
    """Compare every file of the checkpoint in `folder` with its description.

    Hooks may have written a file of one name on several ranks. Then it has to be that of one of these ranks.

    Raises:
        CheckpointError: naming the first file that is missing or not as a manifest says.
    """
    checkpoint = read_checkpoint(folder)
    files = files_in(folder)
    for name in sorted(checkpoint.files):
        if name not in files:
            raise CheckpointError(f"{folder}/{name} is missing")
        found = describe(files[name])
        if all(manifest.files.get(name) != found for manifest in checkpoint.manifests):
            raise CheckpointError(f"{folder}/{name} is not what was saved: it was cut short or changed")


def describe_files(folder: Path) -> dict[str, Description]:
    """The description of each file in `folder` and its subfolders, by its relative name.

    Raises:
        CheckpointError: if there is a symbolic link among them, which no load would follow, or a file with the name of
            a manifest, which is still to be written.
    """
    links = [path for path in folder.rglob("*") if path.is_symlink()]
    if links:
        raise CheckpointError(f"{links[0]} is a symbolic link: a checkpoint holds files only")
    files = files_in(folder)
    for name in files:
        if is_manifest(name):
            raise CheckpointError(f"{folder / name} has the name of a manifest: a hook has to choose another name")
    return {name: describe(path) for name, path in files.items()}


def describe(path: Path) -> Description:
    """The size of a file in bytes, and a checksum.

    The checksum finds what disks do: they flip bits, and lose or exchange pages. torch adds up each page as 512
    integers, and the checksum is the CRC-32 of these sums and of the bytes behind the last whole page. A CRC-32 of all
    bytes takes longer. Integers that have exchanged their places within a page are not found.
    """
    size = path.stat().st_size
    content = torch.from_file(str(path), size=size, dtype=torch.uint8)  # It is mapped, not copied.
    end_of_pages = size - size % _BYTES_IN_PAGE
    pages = content[:end_of_pages].view(torch.int64).view(-1, _BYTES_IN_PAGE // 8)
    sums = array("q", pages.sum(dim=1).tolist())
    rest = bytes(content[end_of_pages:].tolist())
    return {"bytes": size, "checksum": zlib.crc32(rest, zlib.crc32(sums))}


def files_in(folder: Path) -> dict[str, Path]:
    """The files in `folder` and its subfolders, by their relative names. Symbolic links are left out."""
    files = {}
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            files[path.relative_to(folder).as_posix()] = path
    return files
