"""Data that is half there is made again, and eight ranks that start at once make it once."""

import os
import shutil
import signal
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from torchvision.datasets import MNIST

from common.data import load_data
from common.data.mnist import MNIST_FILES
from common.errors import UserError
from tests.faults.jobs import MOUNTED, ON_LINUX, job, on_tmpfs, run_to_end, script, torchrun

# Draws fewer digits, and leaves a file for every time that they are drawn.
DRAWS = """
import os, pathlib, sys, time
from argparse import Namespace
from pathlib import Path
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


WORKERS = """
import torch
from torch.utils.data import DataLoader
from common.data import DigitImages, collate
digits = DigitImages("none", torch.zeros(6000, 28, 28, dtype=torch.uint8), torch.zeros(6000, dtype=torch.uint8))
for images, _ in DataLoader(digits, 1500, num_workers=2, collate_fn=collate):
    print(len(images), flush=True)
"""


@MOUNTED
@pytest.mark.slow
def test_loader_workers_without_shared_memory_end_the_training(tmp_path):
    """Left to torch, which shares a batch in a thread of the worker's, it would stand still."""
    program = tmp_path / "workers.py"
    program.write_text(WORKERS)
    done = run_to_end(on_tmpfs(Path("/dev/shm"), "size=2m", [sys.executable, str(program)]), 120)
    assert done.returncode != 0
    assert "No space left on device" in done.stderr


@MOUNTED
@pytest.mark.slow
def test_a_level_whose_workers_lack_shared_memory_ends_in_one_line():
    command = [sys.executable, script("00_single_gpu"), "--num-workers", "4", "--max-steps", "60"]
    done = run_to_end(on_tmpfs(Path("/dev/shm"), "size=2m", command), 120)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "error: --num-workers 4 needs 2.3 MiB in /dev/shm, which has 2.0 MiB free: give it more" in done.stderr


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
