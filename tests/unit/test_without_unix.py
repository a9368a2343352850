"""The levels train where there is no `fcntl` and no `os.getuid`, as on Windows, and without what only Linux has."""

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


# Read by Python at its start, in each process: no mallopt, prctl, /proc, affinity and fork, as on other systems.
WITHOUT_LINUX = """
import ctypes, errno, multiprocessing, os, platform, sys

for name in ("fork", "sched_setaffinity", "sched_getaffinity"):
    delattr(os, name)
sys.platform = "freebsd14"
sys.modules["triton"] = None  # which knows Linux only
platform.libc_ver = lambda *_: ("", "")
multiprocessing.get_all_start_methods = lambda: ["spawn"]


class Library(ctypes.CDLL):
    def __getattr__(self, name):
        if name in ("mallopt", "prctl"):
            raise AttributeError(name)
        return super().__getattr__(name)


def without_proc(function):
    def call(path, *args, **kwargs):
        if str(path).startswith("/proc"):
            raise FileNotFoundError(errno.ENOENT, "not on this system", path)
        return function(path, *args, **kwargs)
    return call


ctypes.CDLL = Library
os.stat, os.listdir, os.scandir = map(without_proc, (os.stat, os.listdir, os.scandir))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)  # every rank starts anew where none can be forked
def test_all_levels_and_the_comparison_run_without_what_only_linux_has(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_LINUX)
    command = [sys.executable, "-m", "benchmarks.compare", "--steps", "2", "--rounds", "1", "--dataset", "synthetic"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out")], capture_output=True, text=True, timeout=840, cwd=ladder.ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ladder.ROOT)])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "IN STEP: 5 levels" in done.stdout and "EXACT: " in done.stdout
