"""Loader workers that find no room for their batches."""

import sys
from pathlib import Path

import pytest

from tests.jobs import on_tmpfs, run_to_end

WORKERS = """
import torch
from torch.utils.data import DataLoader
from common.data import DigitImages, collate
digits = DigitImages("none", torch.zeros(6000, 28, 28, dtype=torch.uint8), torch.zeros(6000, dtype=torch.uint8))
for images, _ in DataLoader(digits, 1500, num_workers=2, collate_fn=collate):
    print(len(images), flush=True)
"""


@pytest.mark.usefixtures("needs_mount")
@pytest.mark.slow
def test_loader_workers_without_shared_memory_end_the_training(tmp_path):
    """Left to torch, which shares a batch in a thread of the worker's, it would stand still."""
    program = tmp_path / "workers.py"
    program.write_text(WORKERS)
    done = run_to_end(on_tmpfs(Path("/dev/shm"), "size=2m", [sys.executable, str(program)]), 120)
    assert done.returncode != 0
    assert "No space left on device" in done.stderr
