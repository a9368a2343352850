"""The throughput of the levels: what is measured is the level's own step, with its fair share of the cores."""

import pytest
import torch

from benchmarks.suites import throughput
from benchmarks.suites.throughput import Configuration
from common import ladder


@pytest.fixture
def no_gpu(monkeypatch):
    """A machine of 16 cores without GPUs, so that a test of rows on a CPU holds everywhere."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(throughput, "available_cores", lambda: 16)


def test_on_gpus_no_row_has_a_share_of_the_cores(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    configurations = throughput.strong_scaling(64)
    assert {row.batch_size for row in configurations} == {64}
    assert not any(row.apart or row.cores_per_device for row in configurations)


def test_strong_scaling_keeps_the_global_batch_and_weak_scaling_the_share(no_gpu):
    strong, weak = throughput.strong_scaling(64), throughput.weak_scaling(64)
    share = strong.pop()
    assert (share.batch_size, share.workers, share.cores_per_device) == (32, 1, 8)
    assert {row.batch_size for row in strong} == {64}
    assert {row.batch_size // row.workers for row in weak} == {64}
    for rows in (strong, weak):
        all_cores = rows.pop()
        assert (all_cores.name, all_cores.cores_per_device) == ("00_single_gpu, all cores", None)
        assert {row.cores_per_device for row in rows} == {8}
        assert len({row.name for row in rows}) == len(rows)
    on_two = {(level, 2) for level in ladder.levels()[1:]}
    first = ("00_single_gpu", 1)
    for rows in (strong, weak):
        assert {(row.level, row.workers) for row in rows} == on_two | {first}


def test_a_row_on_a_device_asks_its_level_for_that_devices_cores(monkeypatch):
    asked = []

    class Pool:
        def run(self, job, level, argv, threads, *args, **kwargs):
            asked.append((level, argv, threads))
            return [{"images_per_sec": 1.0}]

    monkeypatch.setattr(throughput, "ranks", lambda processes: Pool())
    monkeypatch.setattr(throughput, "available_cores", lambda: 16)
    Configuration("02_ddp_raw", 2, 64, 3).run(5)
    Configuration("00_single_gpu", 1, 64, apart=throughput.ALL_CORES).run(5)
    (_, confined, threads), (_, free, all_threads) = asked
    assert confined[-2:] == ["--cores-per-device", "3"] and threads == 3
    assert "--cores-per-device" not in free and all_threads == 16


def test_a_sample_on_a_fast_gpu_and_its_warm_up_fit_into_an_epoch(monkeypatch):
    result = {"device": "cuda", "backend": None, "dataset": "mnist", "images_per_sec": 1e7}
    monkeypatch.setattr(Configuration, "run", lambda *args: result)
    for_gpu = throughput.Throughput([Configuration("00_single_gpu", 1, 256)])
    assert for_gpu.steps == for_gpu.warm_up == 60_000 // 256 // 2
