"""Level 02's minimal.py, which imports nothing of this repository, trains the weights of its train.py."""

import os
import subprocess
import sys

import pytest
import torch

from common import ladder
from common.data.mnist import MNIST_FILES, raw_folder
from common.data.synthetic import read_synthetic
from common.model import BasicNet
from tests.levels import farthest, run_on_ranks

SAMPLES = 640
MINIMAL = ladder.ROOT / "02_ddp_raw" / "minimal.py"
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(MINIMAL)]


def write_as_mnist(folder, images, labels):
    """The samples as the files of MNIST that torchvision reads, those of the test set as well."""
    raw = raw_folder(folder)
    raw.mkdir(parents=True)
    for name in MNIST_FILES:
        values = images if "images" in name else labels
        sizes = [0x0800 + values.dim(), *values.shape]
        header = b"".join(size.to_bytes(4, "big") for size in sizes)
        (raw / name).write_bytes(header + values.numpy().tobytes())


@pytest.mark.slow
def test_minimal_ends_with_the_weights_of_train(tmp_path):
    (images, labels), _ = read_synthetic()
    write_as_mnist(tmp_path / "data", images[:SAMPLES], labels[:SAMPLES])
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(LAUNCH, cwd=tmp_path, env=alone, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    minimal = torch.load(tmp_path / "minimal.pt", weights_only=True)

    few = ["--dataset", "synthetic", "--train-samples", str(SAMPLES), "--eval-samples", "64"]
    _, weights = run_on_ranks("02_ddp_raw", 2, [*few, "--no-dropout"])
    own_names = dict(zip(weights, minimal.values(), strict=True))
    assert farthest(own_names, weights) <= 1e-6

    torch.manual_seed(42)
    assert farthest(BasicNet().state_dict(), weights) > 1e-3, "the weights have moved"
