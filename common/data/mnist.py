"""MNIST on disk, in the folder where torchvision keeps it: it is found, verified and downloaded."""

import contextlib
import hashlib
import http.client
import os
import socket
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from common.errors import fail
from common.files import nearest_existing

# The md5 of each file as published with the dataset: nothing else passes for MNIST.
MNIST_FILES = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}


class CannotDownload(Exception):
    """MNIST cannot be had; the message says why, in one line."""


def raw_folder(data_dir: str | Path) -> Path:
    return Path(data_dir) / "MNIST" / "raw"


def mnist_on_disk(data_dir: str | Path) -> bool:
    """True if all four files are in `data_dir`. `read_mnist` checks their content."""
    return all(os.path.exists(raw_folder(data_dir) / name) for name in MNIST_FILES)


def read_mnist(data_dir: str | Path, part: str) -> tuple[Tensor, Tensor]:
    """The images (n, 28, 28) and labels (n,) of a part of MNIST, "train" or "t10k", as uint8 tensors.

    Raises UserError if a file is not the published one, or cannot be read.
    """
    raw = raw_folder(data_dir)
    images = _read(raw / f"{part}-images-idx3-ubyte", header=16)
    labels = _read(raw / f"{part}-labels-idx1-ubyte", header=8)
    return images.view(-1, 28, 28), labels


def _read(path: Path, header: int) -> Tensor:
    """The bytes of an IDX file behind its header, once the checksum has shown what the file is."""
    advice = f"Remove {path.parent} to have MNIST fetched again, or use --dataset synthetic"
    try:
        content = bytearray(path.read_bytes())
    except OSError as error:
        fail(f"{error}. {advice}")
    if hashlib.md5(content).hexdigest() != MNIST_FILES[path.name]:
        fail(f"{path} is damaged: its checksum is not that of MNIST. {advice}")
    return torch.frombuffer(content, dtype=torch.uint8, offset=header)


def download(data_dir: str | Path) -> None:
    """Fetch MNIST through torchvision, and move its four files into `data_dir` once all of them are here.

    If the process is killed between two moves, `mnist_on_disk` remains False, and the next call fetches all four again.

    Raises CannotDownload if there is no network, or if nothing can be written to the folder.
    """
    from torchvision.datasets import MNIST

    raw = raw_folder(data_dir)
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(10)
    # No folder is made before there is something to put into it: the name of the data folder may be misspelt.
    try:
        with tempfile.TemporaryDirectory(dir=nearest_existing(raw), prefix="download-") as folder:
            with contextlib.redirect_stdout(sys.stderr):
                MNIST(folder, download=True)
            raw.mkdir(parents=True, exist_ok=True)
            for name in MNIST_FILES:
                (raw_folder(folder) / name).replace(raw / name)
    except (OSError, RuntimeError, http.client.HTTPException) as error:
        raise CannotDownload(" ".join(str(error).split()) or type(error).__name__) from error
    finally:
        socket.setdefaulttimeout(before)
