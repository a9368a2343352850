"""The levels start and train where there is no `fcntl` and no `os.getuid`, as on Windows."""

import os
import subprocess
import sys

import pytest

from common import ladder

HIDING = """
import os, sys
sys.modules["fcntl"] = None
del os.getuid
from common import ladder
from common.args import parse_args
from common.machine import fit_to_machine
for rung in ("00_single_gpu", ladder.FULL):
    module = ladder.load(rung)
    flags = ["--checkpoint-dir", "c", "--checkpoint-every", "1"] if rung == ladder.FULL else []
    module.train(fit_to_machine(parse_args(module.__file__, [*sys.argv[1:], *flags])))
"""
SMALL = ["--dataset", "synthetic", "--train-samples", "64", "--eval-samples", "32", "--batch-size", "32"]


@pytest.mark.slow
def test_levels_train_without_what_only_unix_has(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", HIDING, *SMALL, "--json", "r.json"],
        capture_output=True, text=True, timeout=240, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ladder.ROOT), "USERNAME": "somebody"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("synthetic accuracy") == 2
    assert (tmp_path / "r.json").exists() and list((tmp_path / "c").rglob("manifest.json"))
