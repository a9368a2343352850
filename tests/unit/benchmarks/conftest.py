"""The recorded comparison, with every promise kept; and a user's network."""

import pytest

from benchmarks.harness.options import CannotMeasure
from benchmarks.harness.two_nodes import two_nodes
from benchmarks.report import page_tables
from benchmarks.your_network.spec import load
from benchmarks.your_network.user_network import UserNetwork
from tests.unit.benchmarks.example_networks import SENTENCES_SPEC


@pytest.fixture(scope="session")
def needs_two_nodes() -> None:
    """The test is skipped where no two nodes can be made of network namespaces."""
    try:
        with two_nodes():
            pass
    except CannotMeasure as reason:
        pytest.skip(str(reason))


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
