"""What the benchmarks do on a machine with GPUs: nothing of the CPU's work starts one, and no sample waits."""

import pytest
import torch

from benchmarks.harness import proof
from benchmarks.suites import limit, memory, overlap, throughput, timeline
from benchmarks.suites.throughput import Configuration, Throughput
from common.data.digits import DigitImages
from tests.gpu.machine import imitated_rank

GPU = torch.device("cuda", 0)


@pytest.fixture
def digits():
    return DigitImages("none", torch.zeros(256, 28, 28, dtype=torch.uint8), torch.zeros(256, dtype=torch.uint8))


def test_the_staircase_begins_with_level_00s_optimizer(digits):
    parameters = [torch.nn.Parameter(torch.ones(2))]
    level_00 = torch.optim.AdamW(parameters, lr=limit.LEARNING_RATE)
    first = limit.Training(limit.Step(), digits, torch.device("cpu"))
    assert first.optimizer.defaults == level_00.defaults
    assert limit.Training(limit.Step(fused=True), digits, torch.device("cpu")).optimizer.defaults["fused"]


def test_on_a_gpu_the_first_stair_updates_all_parameters_at_once(digits):
    with imitated_rank() as machine:
        training = limit.Training(limit.Step(), digits, GPU)
        training.make_steps(1)
        for parameter in training.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        machine.watch.operations.clear()
        training.optimizer.step()
    # Of the mean, of the squares' mean, and of the weights: one operation for all parameters, and not one for each.
    updates = [name for name in machine.watch.operations if "lerp" in name or "addcmul" in name or "addcdiv" in name]
    assert len(updates) == 3 and all("_foreach" in name for name in updates)


@pytest.mark.parametrize("changes", [{}, pytest.param({"resident": True, "bf16": True}, marks=pytest.mark.slow)])
def test_a_sample_of_a_stair_waits_once_at_its_end(changes, digits):
    with imitated_rank() as machine:
        training = limit.Training(limit.Step(**changes), digits, GPU)
        training.train(5)
        assert machine.waits_within_steps() == []
        at_the_end = [wait.operation for wait in machine.watch.waits if wait.step == 5]
    assert at_the_end == ["synchronize"]


@pytest.mark.parametrize(
    "capability, has_triton, compiler, obstacle",
    [
        ((9, 0), True, "gcc", None),
        ((6, 1), True, "gcc", "the GPU is older"),
        ((9, 0), False, "gcc", "needs Triton"),
        ((9, 0), True, None, "a C compiler"),
    ],
)
def test_a_gpu_compiles_only_with_triton_and_a_compiler(capability, has_triton, compiler, obstacle, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(limit, "find_spec", lambda name: has_triton or None)
    monkeypatch.setattr(limit.shutil, "which", lambda name: compiler and f"/usr/bin/{name}")
    found = limit.why_no_compiler(GPU)
    assert found is None if obstacle is None else obstacle in found


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
    for module in (memory, overlap, timeline):
        monkeypatch.setattr(module, "ranks", pools)
    memory._simulated(["basic_net"], memory.DATA_PARALLEL, 2)
    memory._simulated([], memory.DDP, 2)
    overlap._trained.__wrapped__("torch's DDP", 1)
    timeline.over_loopback("naive", 1)
    assert pools.on_cpu == [True] * 4


def test_the_memory_that_is_measured_is_measured_where_the_gpus_are(monkeypatch):
    pools = Pools()
    monkeypatch.setattr(memory, "ranks", pools)
    memory.on_ranks(memory.allocated, [], memory.DDP, 2, "nccl")
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
        known = {"threads_per_process": 1, "backend": None, "dataset": "none", "minor_faults_per_step": 0.0}
        known |= {"allocator": {}, "pinned_to_cores": False, "device": device}
        return known | {"global_batch_size": 64, "images_per_sec": 64 / step_seconds}

    monkeypatch.setattr(Configuration, "run", run)
    timed = Throughput([Configuration("00_single_gpu")], seconds=1.0)
    assert timed.warm_up * step_seconds >= least_seconds
    assert timed.steps * step_seconds == (1.0 if device == "cuda" else 400 * step_seconds)
    assert throughput.WARM_UP_SECONDS == limit.WARM_UP_SECONDS == 0.5


def test_the_staircase_warms_a_gpu_up_by_time(monkeypatch):
    class Training:
        device = GPU
        seconds = 0.0

        def train(self, steps: int) -> None:
            self.seconds += steps * 0.001

    training = Training()
    monkeypatch.setattr(limit.time, "perf_counter", lambda: training.seconds)
    limit.warm_up(training)
    assert training.seconds == pytest.approx(0.5, abs=0.01)
