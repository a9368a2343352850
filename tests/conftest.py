"""What every test may use."""

import gc
import os
from pathlib import Path

import pytest

from benchmarks.conftest import one_thread  # noqa: F401 - a fixture of the tests too
from common.data import mnist_on_disk


@pytest.fixture(scope="session")
def mnist() -> str:
    """The value of --data-dir under which real MNIST lies; the test is skipped where it does not."""
    root = Path(os.environ.get("MNIST_ROOT", "data")).resolve()
    if not mnist_on_disk(root):
        pytest.skip(f"real MNIST is not in {root}/MNIST/raw (set MNIST_ROOT)")
    return str(root)


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
