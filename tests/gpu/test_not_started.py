"""Work of the CPU on a machine with GPUs: it starts CUDA nowhere, neither in a fork nor in a pool of ranks."""

import os

import pytest
import torch

from common import processes
from common.accelerator.launchers import debug_launcher
from common.processes import ranks
from tests.gpu.jobs import Started, gpu_that_must_not_start, step_on_the_cpu, where_cuda_must_not_start

# Older optimizers ask CUDA itself, and only whether it records a graph, which starts nothing.
ASKS_THE_GPU = pytest.mark.skipif(
    not hasattr(torch.optim.Optimizer, "_accelerator_graph_capture_health_check"),
    reason=f"the optimizers of torch {torch.__version__} do not start CUDA for tensors of the CPU",
)


@ASKS_THE_GPU
def test_a_step_on_the_cpu_starts_cuda_where_a_gpu_is_visible():
    with gpu_that_must_not_start(), pytest.raises(Started):
        step_on_the_cpu()


@ASKS_THE_GPU
def test_forked_processes_of_the_cpu_see_no_gpu_although_the_parent_has_looked():
    def train():
        assert not torch.cuda.is_available()
        assert torch.cuda.device_count() == 0
        step_on_the_cpu()

    with gpu_that_must_not_start():
        assert torch.cuda.is_available()
        debug_launcher(train)
        assert torch.cuda.is_available(), "the notebook itself still sees its GPUs"


@ASKS_THE_GPU
def test_a_pool_of_the_cpu_sees_no_gpu():
    with gpu_that_must_not_start():
        pool = ranks(1, on_cpu=True)
        assert pool is not ranks(1)
    try:
        (weight,) = pool.run(where_cuda_must_not_start, step_on_the_cpu)
    finally:
        pool.stop()
    assert weight < 1


def test_after_a_job_the_ranks_keep_no_memory_of_a_gpu(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))

    class Pipe:
        def send(self, answer):
            calls.append(answer.result)

    processes._run(processes.Job(os.getpid, (), {}, {}), Pipe())
    assert "empty" in calls
