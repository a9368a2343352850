"""Level 02's scripts in torch alone: minimal.py trains the weights of train.py, profile_step.py shows its time."""

import os
import re
import subprocess

import pytest
import torch

from common import ladder
from common.data.mnist import MNIST_FILES, raw_folder
from common.data.synthetic import read_synthetic
from common.model import BasicNet
from common.weights import max_weight_difference
from tests.jobs import torchrun
from tests.levels import run_on_ranks

SAMPLES = 640
LEVEL = ladder.ROOT / "02_ddp_raw"


def run_in(folder, script, *flags):
    """Run a script of level 02 on two ranks, in a folder from which this repository cannot be imported."""
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = torchrun(str(LEVEL / script), *flags)
    done = subprocess.run(command, cwd=folder, env=alone, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


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
    run_in(tmp_path, "minimal.py")
    minimal = torch.load(tmp_path / "minimal.pt", weights_only=True)

    few = ["--dataset", "synthetic", "--train-samples", str(SAMPLES), "--eval-samples", "64"]
    _, weights = run_on_ranks("02_ddp_raw", 2, [*few, "--no-dropout"])
    own_names = dict(zip(weights, minimal.values(), strict=True))
    assert max_weight_difference(own_names, weights) <= 1e-6

    torch.manual_seed(42)
    assert max_weight_difference(BasicNet().state_dict(), weights) > 1e-3, "the weights have moved"


@pytest.mark.slow
def test_the_profile_names_each_kind_on_both_ranks_and_writes_their_traces(tmp_path):
    printed = run_in(tmp_path, "profile_step.py", "--images", "2")
    # Below the head, "computing        12.3     11.9": a kind, and the milliseconds of each rank.
    rows = re.findall(r"^(\w+) +(\d+\.\d) +(\d+\.\d)$", printed, re.MULTILINE)
    milliseconds = {kind: [float(rank_0), float(rank_1)] for kind, rank_0, rank_1 in rows}
    assert list(milliseconds) == ["computing", "copying", "other", "sending"]
    assert min(milliseconds["computing"]) > 0 and min(milliseconds["sending"]) > 0
    for rank in (0, 1):
        assert "gloo:all_reduce" in (tmp_path / f"trace_rank_{rank}.json").read_text()


def test_the_page_shows_lines_of_minimal():
    blocks = (LEVEL / "README.md").read_text().split("```")
    (shown,) = [block for block in blocks if block.startswith("python\ndist.")]
    assert set(shown.splitlines()) - {"python", "…"} <= set((LEVEL / "minimal.py").read_text().splitlines())
