"""A comparison's results with every promise kept, small enough to say what each number is; and a user's network."""

import copy

import pytest

from benchmarks.report import plots
from benchmarks.suites import throughput
from benchmarks.your_network import spec
from common import ladder
from common.memory import CATEGORIES
from tests.unit.benchmarks.user_network import TEXTS

MIB = 2**20
ALL_CORES = "00_single_gpu, all cores"
SHARE = "00_single_gpu, a share of 32"


def _split(*mib: float) -> dict[str, int]:
    return {name: int(size * MIB) for name, size in zip(CATEGORIES, mib, strict=True)}


EVEN, FULL, LIGHT = _split(5, 5, 10, 8, 5, 7), _split(5, 9, 10, 8, 5, 3), _split(5, 5, 0, 8, 1, 1)


def _level(level: str) -> dict:
    world_size = 1 if level == "00_single_gpu" else 2
    peaks = {"00_single_gpu": [EVEN], "01_data_parallel": [FULL, LIGHT]}.get(level, [EVEN, EVEN])
    result = {
        "run": {
            "level": level,
            "dataset": "mnist",
            "world_size": world_size,
            "accuracy": 0.95,
            "evaluated": 10_000,
            "peak_memory_bytes": None,
        },
        "max_weight_difference": 0.0 if level == "00_single_gpu" else 3e-13,
        "weight_checksum": "0badcafe",
        "simulated_peak_memory": peaks,
    }
    return result | ({"evaluated_on": {"3": 10_000}} if level in ladder.DISTRIBUTED else {})


def _memory(network: str, title: str, devices: int) -> list[dict]:
    row = {"network": network, "title": title, "global_batch_size": 64, "devices": devices, "allocated": None}
    row |= {"source": "simulated"}
    ddp, dp = [EVEN] * devices, [FULL] + [LIGHT] * (devices - 1)
    return [row | {"wrapper": "DataParallel", "peaks": dp}, row | {"wrapper": "DDP", "peaks": ddp}]


def _report() -> dict:
    levels = ladder.levels()
    speed = {level: [900.0 - 50 * i, 910.0 - 50 * i, 905.0 - 50 * i] for i, level in enumerate(levels)}
    facts = {}
    for level in levels:
        workers = 1 if level == "00_single_gpu" else 2
        facts[level] = {"level": level, "workers": workers, "cores_per_device": 1, "apart": ""}
    speed[ALL_CORES] = [1300.0, 1310.0, 1305.0]
    facts[ALL_CORES] = {"level": levels[0], "workers": 1, "cores_per_device": None, "apart": "all cores"}
    speed[SHARE] = [1000.0, 1010.0, 1005.0]
    facts[SHARE] = {"level": levels[0], "workers": 1, "cores_per_device": 1, "apart": "a share of 32"}
    for name, row in facts.items():
        row["global_batch_size"] = 32 if name == SHARE else 64
    return {
        "complete": True,
        "interrupted": False,
        "failures": [],
        "machine": {"processor": "x86_64", "cores": 2, "gpus": [], "python": "3.11.7", "torch": "2.11.0"},
        "world_size": 2,
        "cores_per_device": 1,
        "global_batch_size": 64,
        "steps": 60,
        "proof_steps": 10,
        "levels": {level: _level(level) for level in levels},
        "throughput": [throughput.record("global batch 64", speed, facts)],
        "memory": [row for n in (2, 4, 8) for row in _memory("basic_net", "BasicNet", n)],
    }


@pytest.fixture
def report() -> dict:
    return copy.deepcopy(_report())


@pytest.fixture
def coarse(monkeypatch):
    """Plots with few pixels, for tests that need no more."""
    monkeypatch.setattr(plots, "DPI", 40)


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
