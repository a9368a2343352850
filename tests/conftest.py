"""What every test may use."""

import os
from pathlib import Path

import pytest

from common.data import MNIST_FILES


@pytest.fixture(scope="session")
def mnist() -> str:
    """The value of --data-dir under which real MNIST lies; the test is skipped where it does not."""
    root = Path(os.environ.get("MNIST_ROOT", "data")).resolve()
    missing = [name for name in MNIST_FILES if not (root / "MNIST" / "raw" / name).exists()]
    if missing:
        pytest.skip(f"real MNIST is not in {root}/MNIST/raw (set MNIST_ROOT)")
    return str(root)
