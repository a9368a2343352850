"""The recorded comparison, with every promise kept; and a user's network."""

import pytest

from benchmarks.report import page_tables
from benchmarks.your_network import memory, spec
from benchmarks.your_network.memory import Setting
from benchmarks.your_network.without_computing import FusedAttention
from tests.unit.benchmarks.user_network import TEXTS, need


@pytest.fixture
def report() -> dict:
    return page_tables.recorded("results")


@pytest.fixture
def written(tmp_path):
    """A file of somebody's, as SPEC names the function `build` in it."""

    def write(text: str) -> str:
        path = tmp_path / "mine.py"
        path.write_text(f"import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n{text}")
        return f"{path}:build"

    return write


@pytest.fixture
def texts_file(tmp_path):
    path = tmp_path / "texts.py"
    path.write_text(TEXTS)
    return f"{path}:build"


@pytest.fixture
def texts(texts_file):
    return spec.load(texts_file)


@pytest.fixture
def network_of(written):
    """A network that is written to a file."""

    def load(text: str, shape: tuple[int, ...] | None = None) -> spec.UserNetwork:
        return spec.load(written(text), shape)

    return load


@pytest.fixture
def computed_need(monkeypatch):
    """The need of a step that is really computed."""

    def computed(network: spec.UserNetwork, setting: Setting, samples: int) -> memory.DeviceBytes:
        with monkeypatch.context() as patched:
            patched.setattr(memory, "without_computing", FusedAttention)
            return need(network, setting, samples)

    return computed
