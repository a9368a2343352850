"""The levels start and train where there is no `fcntl` and no `os.getuid`, as on Windows."""

import os
import subprocess
import sys

import pytest

from common import ladder
from common.data.synthetic import synthetic_folder

# filelock has no fcntl here either, and does with files that exist or not; on Windows it has a real lock.
HIDING = """
import os, sys, warnings
sys.modules["fcntl"] = None
del os.getuid
warnings.filterwarnings("ignore", "only soft file lock is available")
from common import ladder
from common.args import parse_args
for rung in ("00_single_gpu", ladder.FULL):
    module = ladder.load(rung)
    flags = ["--checkpoint-dir", "c", "--checkpoint-every", "1"] if rung == ladder.FULL else []
    module.train(parse_args(module.__file__, [*sys.argv[1:], *flags]))
"""
SMALL = ["--dataset", "synthetic", "--train-samples", "64", "--eval-samples", "32", "--batch-size", "32"]


@pytest.mark.slow
def test_levels_train_without_what_only_unix_has(tmp_path):
    # A cache of its own: a file that is locked here by existing is left behind by the other kind of lock.
    drawn = synthetic_folder().parent.parent
    cache = tmp_path / "parallelism-ladder"
    cache.mkdir()
    (cache / drawn.name).symlink_to(drawn)
    done = subprocess.run(
        [sys.executable, "-c", HIDING, *SMALL, "--json", "r.json"],
        capture_output=True, text=True, timeout=240, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ladder.ROOT), "XDG_CACHE_HOME": str(tmp_path), "USERNAME": "somebody"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("synthetic accuracy") == 2
    assert (tmp_path / "r.json").exists() and list((tmp_path / "c").rglob("manifest.json"))
