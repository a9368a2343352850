"""The recorded comparison, with every promise kept; and a user's network."""

import pytest

from benchmarks.report import page_tables
from benchmarks.your_network.spec import load
from benchmarks.your_network.user_network import UserNetwork
from tests.unit.benchmarks.example_networks import SENTENCES_SPEC


@pytest.fixture
def report() -> dict:
    return page_tables.recorded("results")


@pytest.fixture
def sentences() -> UserNetwork:
    return load(SENTENCES_SPEC)


@pytest.fixture
def write_network(tmp_path):
    """Writes a file of somebody's, and returns SPEC, which names the function `build` in it."""

    def write(text: str) -> str:
        path = tmp_path / "mine.py"
        path.write_text(f"import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n{text}")
        return f"{path}:build"

    return write
