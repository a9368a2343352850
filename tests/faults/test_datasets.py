"""Data that is half there is made again, and eight ranks that start at once make it once."""

import os
import shutil
import signal
import sys
from argparse import Namespace

import pytest
import torch
from torchvision.datasets import MNIST

from common.data import load_data
from common.data.mnist import MNIST_FILES
from common.errors import UserError
from tests.faults.jobs import ON_LINUX, job, run_to_end, torchrun

# Draws fewer digits, and leaves a file for every time that they are drawn.
DRAWS = """
import os, pathlib, sys, time
from argparse import Namespace
import torch
from common.data import synthetic
from common.data import load_data
folder, slowly = sys.argv[1:]
honest, synthetic.SIZES = synthetic.write_idx, {"train": 300, "t10k": 50}
def write_idx(path, values):
    if "t10k-labels" in path.name:
        pathlib.Path(folder, f"drawn by {os.getpid()}").touch()
        time.sleep(float(slowly))
    honest(path, values)
synthetic.write_idx = write_idx
settings = {"dataset": "synthetic", "data_dir": "none", "dtype": torch.float32}
train_set, test_set = load_data(Namespace(**settings, train_samples=None, eval_samples=None, data="host"))
os.write(1, f"{len(train_set)} + {len(test_set)}: {int(train_set.images.sum())}\\n".encode())
"""


@ON_LINUX
@pytest.mark.long
def test_eight_ranks_draw_once_also_after_a_kill_in_the_middle_of_drawing(tmp_path):
    program, cache = tmp_path / "draws.py", {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    program.write_text(DRAWS)
    with job([sys.executable, str(program), str(tmp_path), "3600"], **cache) as drawing:
        drawing.wait_for(lambda: list(tmp_path.glob("drawn by *")))
        os.kill(drawing.process.pid, signal.SIGKILL)
        drawing.end()
    (half,) = tmp_path.glob("cache/*/.*")
    done = run_to_end(torchrun(str(program), str(tmp_path), "0", processes=8), **cache)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split("\n")[:-1]
    assert len(lines) == 8 and len(set(lines)) == 1 and lines[0].startswith("300 + 50: ")
    assert len(list(tmp_path.glob("drawn by *"))) == 2
    assert not half.exists()


@pytest.mark.parametrize("missing", MNIST_FILES)
def test_a_download_that_was_interrupted_is_not_taken_for_mnist(missing, tmp_path, monkeypatch):
    monkeypatch.setattr(MNIST, "mirrors", ["http://127.0.0.1:9/"])  # no network
    raw = tmp_path / "MNIST" / "raw"
    (raw / "download-1a2b" / "MNIST" / "raw").mkdir(parents=True)
    for name in MNIST_FILES:
        (raw / "download-1a2b" / "MNIST" / "raw" / name if name == missing else raw / name).write_bytes(b"half")
    settings = {"dataset": "mnist", "data_dir": tmp_path, "dtype": torch.float32}
    with pytest.raises(UserError, match=r"MNIST is not in .* and cannot be downloaded"):
        load_data(Namespace(**settings, train_samples=None, eval_samples=None, data="host"))
    shutil.rmtree(tmp_path / "MNIST")
