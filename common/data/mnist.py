"""MNIST on disk: where torchvision keeps it, whether it is there and whole, and how it is fetched."""

import contextlib
import hashlib
import http.client
import socket
import sys
import tempfile
from pathlib import Path

# The md5 of each file as published with the dataset: nothing else passes for MNIST.
MNIST_FILES = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}


def mnist_on_disk(data_dir: str | Path) -> bool:
    """Are all four files in `data_dir`? Their content is for `load_data` to check."""
    raw = raw_folder(data_dir)
    return all((raw / name).exists() for name in MNIST_FILES)


def raw_folder(data_dir: str | Path) -> Path:
    return Path(data_dir) / "MNIST" / "raw"


def download(raw: Path) -> str | None:
    """Fetch MNIST through torchvision into `raw`, complete or not at all. Returns why it could not be, or None."""
    from torchvision.datasets import MNIST

    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(10)
    made: list[Path] = []
    try:
        made = [folder for folder in (raw, *raw.parents) if not folder.exists()]
        raw.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=raw, prefix="download-") as folder:
            with contextlib.redirect_stdout(sys.stderr):
                MNIST(folder, download=True)
            for name in MNIST_FILES:
                (raw_folder(folder) / name).replace(raw / name)
    except (OSError, RuntimeError, http.client.HTTPException) as error:
        for empty in made:  # of a data folder that may be misspelt nothing is left
            with contextlib.suppress(OSError):
                empty.rmdir()
        one_line = " ".join(str(error).split())
        return one_line or type(error).__name__
    finally:
        socket.setdefaulttimeout(before)
    return None


def md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()
