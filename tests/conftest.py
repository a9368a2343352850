"""What every test may use."""

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
