"""The levels train without what only Linux has, and where there is no `fcntl` and no `os.getuid`, as on Windows."""

import os
import subprocess
import sys

import pytest

from common import ladder
from tests.levels import run_script

SMALL = ["--dataset", "synthetic", "--train-samples", "64", "--eval-samples", "32", "--batch-size", "32"]


# Read by Python at its start, in each process: no mallopt, prctl, /proc, affinity and fork, as on other systems.
WITHOUT_LINUX = """
import ctypes, errno, multiprocessing, os, platform, sys

for name in ("fork", "getuid", "sched_setaffinity", "sched_getaffinity"):
    delattr(os, name)
sys.modules["fcntl"] = None
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


@pytest.fixture
def elsewhere(tmp_path):
    """The environment of a system without them."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_LINUX)
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ladder.ROOT)]), "USERNAME": "somebody"}


@pytest.mark.slow
@pytest.mark.parametrize("level", [*ladder.levels(), ladder.FULL])
def test_a_level_trains_without_what_only_linux_has(level, elsewhere, tmp_path):
    flags = ["--checkpoint-dir", f"{tmp_path}/checkpoints"] if level == ladder.FULL else []
    processes = 2 if level in ladder.DISTRIBUTED else None
    done = run_script(level, [*SMALL, *flags], processes=processes, **elsewhere)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("synthetic accuracy") == 1
    assert bool(flags) == any(tmp_path.rglob("manifest.json"))


@pytest.mark.long
@pytest.mark.timeout(900)  # every rank starts anew where none can be forked
def test_the_comparison_runs_without_what_only_linux_has(tmp_path, elsewhere):
    flags = ["--steps", "2", "--rounds", "1", "--dataset", "synthetic", "--out", str(tmp_path / "out")]
    command = [sys.executable, "-m", "benchmarks.compare", *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ladder.ROOT, env=os.environ | elsewhere)
    assert done.returncode == 0, done.stderr
    assert "IN STEP: 5 levels" in done.stdout and "EXACT: " in done.stdout
