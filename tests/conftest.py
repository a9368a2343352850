"""Fixtures of every test, and how the whole suite is shared out over the cores."""

import contextlib
import gc
import math
import os
import re
import signal
from pathlib import Path

import hypothesis
import pytest
import torch

from common.cores import available_cores
from common.data import mnist_on_disk
from common.processes import RankFailed, started_pools
from tests.peers import import_or_skip
from tests.states import forget_states

# A machine that others use too may be slow, and a run is to be repeatable.
hypothesis.settings.register_profile("tests", deadline=None, derandomize=True)
hypothesis.settings.load_profile("tests")
# Each worker imports torch and transformers, and starts the ranks of its tests: about 2 GB.
MOST_WORKERS = 4
# GiB: with less left, ranks that wait for a job are ended between two test files.
LEAST_GIB = 8


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run the whole suite on the CPU, and share it out over the cores, file by file.

    `pytest` in the root, without names of tests, hides the GPUs. Named tests, and `pytest` in a folder of tests, see
    them and run in this process.
    """
    named = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    if named or "PYTEST_XDIST_WORKER" in os.environ:
        return
    # Most tests compare bits, or start more ranks than there may be GPUs.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    decided = config.option.numprocesses is not None or config.option.usepdb
    workers = min(available_cores(), MOST_WORKERS)
    if decided or workers == 1:
        return
    config.option.numprocesses = workers
    config.option.dist = "loadfile"
    # The folders with long tests come first. By default files with few tests come last, and some of them are long.
    config.option.loadscopereorder = False
    # The workers inherit it: a thread of one that waits must not spin on a core that another needs.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_configure() -> None:
    """Listen to Ctrl-C again where the tests run in the background.

    A shell has a job in the background ignore SIGINT, and so would every process that a test starts and interrupts.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def available_gib() -> float:
    """GiB of memory that programs may still take; infinite where the system does not say."""
    path = Path("/proc/meminfo")
    if not path.exists():
        return math.inf
    found = re.search(r"^MemAvailable: +(\d+) kB$", path.read_text(), re.MULTILINE)
    return int(found[1]) / 2**20 if found else math.inf


@pytest.fixture(scope="session")
def mnist() -> str:
    """The value of --data-dir under which real MNIST lies; the test is skipped where it does not."""
    root = Path(os.environ.get("MNIST_ROOT", "data")).resolve()
    if not mnist_on_disk(root):
        pytest.skip(f"real MNIST is not in {root}/MNIST/raw (set MNIST_ROOT)")
    return str(root)


@pytest.fixture(scope="module", autouse=True)
def fresh_processes():
    """Let no file find what another left, a group or an Accelerator: which files ran before it changes."""
    forget_states()
    for pool in started_pools():
        if available_gib() < LEAST_GIB:  # Ranks keep the memory of their jobs; new ones begin small.
            pool.stop()
            continue
        with contextlib.suppress(RankFailed):  # Its ranks are thrown away then, and the next ones are new.
            pool.run(forget_states)


@pytest.fixture(scope="module", autouse=True)
def cheap_garbage_collection():
    """Keep what is there for good, so that a collection looks at a module's own objects only.

    Accelerators and Trainers collect garbage when they free their memory. torch and transformers alone have so many
    objects that each collection would take longer than most tests.
    """
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture
def transformers(monkeypatch):
    """The library, which must not look for anything on the network."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    library = import_or_skip("transformers")
    library.logging.set_verbosity_error()
    return library


@pytest.fixture
def one_thread():
    """Torch computes on one thread: several wait for each other where there is little to do, or another job runs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
