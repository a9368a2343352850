"""The throughput of the levels: what is measured is the level's own step, with its fair share of the cores."""

import pytest
import torch

from benchmarks.harness.configurations import Configuration, Steps
from benchmarks.harness.rows import BASELINE
from benchmarks.suites import throughput
from common import ladder
from common.data.synthetic import SIZES


@pytest.fixture
def no_gpu(monkeypatch):
    """A machine of 16 cores without GPUs, so that a test of rows on a CPU holds everywhere."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(throughput, "available_cores", lambda: 16)


def test_on_gpus_no_row_has_a_share_of_the_cores(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    configurations = throughput.strong_scaling(64)
    assert {row.global_batch_size for row in configurations} == {64}
    assert not any(row.all_cores or row.cores_per_device for row in configurations)


def test_strong_scaling_keeps_the_global_batch_and_weak_scaling_the_share(no_gpu):
    """A device has 8 of the 16 cores, because the larger number of workers is two."""
    one = Configuration(BASELINE, 1, 64, 8)
    all_cores = Configuration(BASELINE, 1, 64, 16, all_cores=True)
    strong = [Configuration(level, 2, 64, 8) for level in ladder.LEVELS[1:]]
    weak = [Configuration(level, 2, 128, 8) for level in ladder.LEVELS[1:]]
    assert throughput.strong_scaling(64) == [one, *strong, all_cores]
    assert throughput.weak_scaling(64) == [one, *weak, all_cores]
    assert not any(row.all_cores for row in throughput.configurations([1], 64))  # its one device has all cores already


def test_a_row_on_a_device_asks_its_level_for_that_devices_cores():
    assert Configuration("02_ddp_raw", 2, 64, 3).argv(Steps(2, 3))[-2:] == ["--cores-per-device", "3"]


@pytest.mark.parametrize(("seconds", "counted"), [(20e-3, 25), (1.0, 2), (1e-6, SIZES["train"] // 256 // 2)])
def test_a_sample_is_half_a_second_but_half_an_epoch_at_most(seconds, counted, monkeypatch):
    monkeypatch.setattr(Configuration, "run", lambda *_: {"global_batch_size": 256, "images_per_sec": 256 / seconds})
    rows = [Configuration(BASELINE, 1, 256)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert throughput.choose_steps(rows, ()) == Steps(2, counted)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert throughput.choose_steps(rows, ()) == Steps(counted, counted)


@pytest.mark.parametrize(("gpus", "sizes"), [(0, [1, 2]), (1, [1]), (3, [1, 2, 3])])
def test_no_row_has_more_workers_than_gpus(gpus, sizes, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert throughput.world_sizes() == sizes
