"""MNIST as tensors: found on disk or downloaded, verified, kept as bytes and normalised a whole batch at a time."""

import contextlib
import fcntl
import hashlib
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from common.errors import fail
from common.idx import IdxError, read_idx

MEAN, STD = 0.1307, 0.3081

# The md5 of each file as published with the dataset: nothing else passes for MNIST.
MNIST_FILES = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}


class DigitImages(Dataset):
    """28×28 grey images and their labels 0–9, held as bytes and handed out normalised.

    One sample is a (1, 28, 28) tensor of `dtype` and an int64 label. `__getitems__`, which DataLoader calls with the
    indices of a whole batch, returns the batch already collated, images (N, 1, 28, 28) and labels (N,): give the
    loader `collate_fn=common.data.collate`. The values are those of torchvision's ToTensor and Normalize.

    Args:
        name: "mnist" or "synthetic"; it is part of every result.
        images: uint8, (n, 28, 28).
        labels: uint8, (n,).
    """

    def __init__(self, name: str, images: Tensor, labels: Tensor, dtype: torch.dtype = torch.float32) -> None:
        self.name = name
        self.images = images.unsqueeze(1)
        self.labels = labels.long()
        self.dtype = dtype

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._normalise(self.images[index]), self.labels[index]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        chosen = torch.tensor(indices)
        return self._normalise(self.images[chosen]), self.labels[chosen]

    def _normalise(self, images: Tensor) -> Tensor:
        # In place: the batch was copied out of the dataset by the indexing, or by the change of type.
        return images.to(self.dtype).div_(255).sub_(MEAN).div_(STD)


def collate(batch):
    """Pass on a batch that the dataset has already collated; collate a list of samples as DataLoader would."""
    return batch if isinstance(batch, tuple) else default_collate(batch)


def load_data(args) -> tuple[DigitImages, DigitImages]:
    """The training and the test set that the flags ask for, the same on every rank.

    `args.dataset` "auto" takes MNIST if it is in `args.data_dir` or can be downloaded, else the synthetic digits, and
    says so. UserError is raised where MNIST is there but damaged, where "mnist" cannot be had, and where ranks on
    different machines have found different datasets.
    """
    with _only_one_process("data", args.data_dir) as note:
        name, folder = _locate(args, note)
    try:
        sets = [_read(name, folder, part, args.dtype) for part in ("train", "t10k")]
    except (OSError, IdxError) as error:
        fail(f"{error}. Remove {folder} to have it made again, or use --dataset synthetic")
    agree(sets[0])
    for dataset, limit in zip(sets, (args.train_samples, args.eval_samples), strict=True):
        dataset.images, dataset.labels = dataset.images[:limit], dataset.labels[:limit]
    return sets[0], sets[1]


def mnist_on_disk(data_dir: str | Path) -> bool:
    """Whether all four files are in `data_dir`; whether they are whole is for `load_data` to see."""
    return all((_raw(data_dir) / name).exists() for name in MNIST_FILES)


def _raw(data_dir: str | Path) -> Path:
    return Path(data_dir) / "MNIST" / "raw"


def _locate(args, note: "_Note") -> tuple[str, Path]:
    """The dataset's name and the folder that holds its four files, which are there when this returns."""
    raw = _raw(args.data_dir)
    if args.dataset != "synthetic":
        if mnist_on_disk(args.data_dir):
            return "mnist", raw
        note.failure = reason = note.failure or _download(raw)
        if reason is None:
            return "mnist", raw
        if args.dataset == "mnist":
            fail(f"MNIST is not in {raw} and cannot be downloaded: {reason}")
        if os.environ.get("RANK", "0") == "0":
            print(
                f"NOT MNIST: it is not in {raw} and cannot be downloaded ({reason}). "
                "Training on the synthetic digits instead (--dataset mnist makes this an error).",
                file=sys.stderr,
            )
    from common.synthetic import synthetic_folder

    return "synthetic", synthetic_folder()


def _download(raw: Path) -> str | None:
    """Fetch MNIST through torchvision into `raw`, complete or not at all. Returns why it could not be, or None."""
    from torchvision.datasets import MNIST

    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(10)
    try:
        raw.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=raw, prefix="download-") as folder:
            with contextlib.redirect_stdout(sys.stderr):
                MNIST(folder, download=True)
            for name in MNIST_FILES:
                (_raw(folder) / name).replace(raw / name)
    except (OSError, RuntimeError) as error:
        return " ".join(str(error).split()) or type(error).__name__
    finally:
        socket.setdefaulttimeout(before)
    return None


def _read(name: str, folder: Path, part: str, dtype: torch.dtype) -> DigitImages:
    images = read_idx(folder / f"{part}-images-idx3-ubyte", dimensions=3)
    labels = read_idx(folder / f"{part}-labels-idx1-ubyte", dimensions=1)
    checksums = MNIST_FILES if name == "mnist" else json.loads((folder / "md5.json").read_text())
    for file in (f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"):
        if md5(folder / file) != checksums[file]:
            raise IdxError(f"{folder / file} is damaged: its checksum is not the one of {name}")
    return DigitImages(name, images, labels, dtype)


def md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


def agree(dataset: DigitImages) -> None:
    """Raise on every rank if the ranks have loaded different data, as machines with different disks may."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, f"{dataset.name} ({len(dataset)} samples)")
    for rank, other in enumerate(everyone):
        if other != everyone[0]:
            fail(f"the ranks have different data: rank 0 {everyone[0]}, rank {rank} {other}. Name one with --dataset")


class _Note:
    """What the process before us, holding the same lock in the same job, could not do."""

    def __init__(self, file, job: str) -> None:
        self._file, self._job = file, job

    @property
    def failure(self) -> str | None:
        self._file.seek(0)
        job, _, failure = self._file.read().partition("\n")
        return failure if job == self._job and failure else None

    @failure.setter
    def failure(self, reason: str | None) -> None:
        self._file.seek(0)
        self._file.truncate()
        self._file.write(f"{self._job}\n{reason or ''}")
        self._file.flush()


@contextlib.contextmanager
def _only_one_process(purpose: str, resource: str) -> Iterator[_Note]:
    """Let the processes of this machine through one by one, so that only the first has to download or generate.

    The lock ends with the process that holds it, however that ends. A failure is noted for the other ranks of the
    job: they neither repeat the attempt nor decide otherwise.
    """
    key = hashlib.sha256(f"{purpose}:{Path(resource).resolve()}".encode()).hexdigest()[:16]
    path = cache_dir() / f"{key}.lock"
    port, run = os.environ.get("MASTER_PORT"), os.environ.get("TORCHELASTIC_RUN_ID")
    job = f"{run}:{port}" if port else f"{os.getpid()}:{time.monotonic_ns()}"
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield _Note(file, job)


def cache_dir() -> Path:
    """A folder of the user's that can be written to, whatever becomes of `--data-dir`."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    for folder in (
        base / "parallelism-ladder",
        Path(tempfile.gettempdir()) / f"parallelism-ladder-{os.getuid()}",
    ):
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return folder
    fail(f"neither {base} nor the folder for temporary files can be written to; set XDG_CACHE_HOME")
