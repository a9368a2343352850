"""The recorded comparison, with every promise kept; and a user's network."""

import pytest

from benchmarks.report import page_tables
from benchmarks.your_network import memory
from benchmarks.your_network.network import UserNetwork, load
from benchmarks.your_network.settings import Setting
from benchmarks.your_network.without_computing import fused_attention
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
    return load(texts_file)


@pytest.fixture
def network_of(written):
    """A network that is written to a file."""

    def of_text(text: str, shape: tuple[int, ...] | None = None) -> UserNetwork:
        return load(written(text), shape)

    return of_text


@pytest.fixture
def computed_need(monkeypatch):
    """The need of a step that is really computed."""

    def computed(network: UserNetwork, setting: Setting, samples: int) -> memory.DeviceBytes:
        with monkeypatch.context() as patched:
            patched.setattr(memory, "without_computing", fused_attention)
            return need(network, setting, samples)

    return computed
