"""What the benchmarks do on a machine with GPUs: nothing of the CPU's work starts one, and no sample waits."""

import pytest

from benchmarks.harness import proof
from benchmarks.suites import memory, timeline
from benchmarks.suites.throughput import SECONDS, Configuration, Throughput


class Pools:
    """In place of `ranks`: notes of each job whether it was given to processes that see no GPU."""

    def __init__(self) -> None:
        self.on_cpu: list[bool] = []

    def __call__(self, world_size: int, on_cpu: bool = False) -> "Pools":
        self.on_cpu.append(on_cpu)
        return self

    def run(self, *args, **kwargs) -> list:
        return [[] for _ in range(8)]


def test_what_is_accounted_or_timed_on_the_cpu_runs_where_no_gpu_is_seen(monkeypatch):
    pools = Pools()
    for module in (memory, timeline):
        monkeypatch.setattr(module, "ranks", pools)
    memory.on_devices(memory.accounted, ["basic_net"], memory.DATA_PARALLEL, 2, "gloo")
    memory.on_devices(memory.accounted, [], memory.DDP, 2, "gloo")
    timeline.over_loopback("naive", 1)
    assert pools.on_cpu == [True] * 3


def test_the_memory_that_is_measured_is_measured_where_the_gpus_are(monkeypatch):
    pools = Pools()
    monkeypatch.setattr(memory, "ranks", pools)
    memory.on_devices(memory.allocated, [], memory.DDP, 2, "nccl")
    assert pools.on_cpu == [False]


def test_the_levels_are_accounted_where_no_gpu_is_seen(monkeypatch):
    from benchmarks import compare

    pools = Pools()
    monkeypatch.setattr(compare, "ranks", pools)
    comparison = compare.Comparison(compare.parse_options([]))
    comparison.on_ranks("02_ddp_raw", proof.peaks, [])
    comparison.on_ranks("02_ddp_raw", proof.train, [])
    assert pools.on_cpu == [True, False]


@pytest.mark.parametrize("device, least_seconds", [("cuda", 0.5), ("cpu", 0)])
def test_a_sample_on_a_gpu_is_long_and_follows_half_a_second(device, least_seconds, monkeypatch):
    step_seconds = 0.0005

    def run(configuration, steps, flags=(), warm_up=3):
        known = {"backend": None, "dataset": "none", "device": device}
        return known | {"global_batch_size": 64, "images_per_sec": 64 / step_seconds}

    monkeypatch.setattr(Configuration, "run", run)
    timed = Throughput([Configuration("00_single_gpu")])
    assert timed.warm_up * step_seconds >= least_seconds
    assert timed.steps * step_seconds == (SECONDS if device == "cuda" else 400 * step_seconds)
