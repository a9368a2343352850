"""Memory per device: a step counted by hand, and what the wrappers do to three networks."""

import gc
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.harness import level_runs
from benchmarks.harness.records import totals
from benchmarks.harness.replica_memory import track_replicas
from benchmarks.harness.rows import BUCKET_VIEWS, DATA_PARALLEL, DDP, FSDP2
from benchmarks.report.verdicts import MOST_IMBALANCE, imbalance
from benchmarks.suites import memory
from benchmarks.suites.memory import NETWORKS, ReferenceNetwork
from common.memory import CATEGORIES
from common.process_group import process_group
from common.processes import ranks
from tests.levels import SHORT

FLOAT, LABEL, SCALAR = 4, 8, 512  # bytes; a scalar fills a block
INPUTS, OUTPUTS, BATCH = 128, 64, 32

LINEAR = ReferenceNetwork("linear", partial(nn.Linear, INPUTS, OUTPUTS, bias=False), (INPUTS,), OUTPUTS, BATCH)
WEIGHTS = INPUTS * OUTPUTS * FLOAT


def _peaks(wrapper: str, devices: int) -> list[dict]:
    with track_replicas() as tracker:
        memory.train(LINEAR, torch.device("cpu"), memory.WRAPPERS[wrapper], devices)
    return list(tracker.peaks().values())


def _peaks_of_rank(wrapper: str) -> list[dict]:
    with process_group():
        return _peaks(wrapper, dist.get_world_size())


def _batch(samples: int) -> int:
    """The images and the labels of a batch, which the loss and the layer save for backward."""
    return samples * INPUTS * FLOAT + max(samples * LABEL, SCALAR)


def test_a_whole_step_of_data_parallel_is_counted_to_the_byte():
    """The first device's peak is where gradients meet: its own, the other replica's, and their sum.

    Temporaries are one of the three, the loss, and the gradient 1 that backward starts from. The second device's is
    forward: the weights' copy, its half of the batch, its outputs; the labels stay where the loss is.
    """
    first, second = _peaks(DATA_PARALLEL, 2)
    assert first == {
        "parameters": WEIGHTS,
        "gradients": 2 * WEIGHTS,
        "optimizer state": 2 * WEIGHTS,
        "activations": _batch(BATCH),
        "communication": 0,
        "temporaries": WEIGHTS + 2 * SCALAR,
    }
    assert second == {
        "parameters": WEIGHTS,
        "gradients": 0,
        "optimizer state": 0,
        "activations": BATCH // 2 * INPUTS * FLOAT,
        "communication": 0,
        "temporaries": BATCH // 2 * OUTPUTS * FLOAT,
    }


@pytest.mark.parametrize("wrapper, bucket", [(DDP, WEIGHTS), (BUCKET_VIEWS, 0)])
def test_a_whole_step_of_ddp_is_counted_to_the_byte_on_each_rank(wrapper, bucket):
    """The peak is in AdamW: the root of the second moment, and that divided by its correction. The loss is alive.

    A bucket is as large as the gradients. With views of buckets these are there once: from the second step on the two
    are one storage.
    """
    expected = {
        "parameters": WEIGHTS,
        "gradients": WEIGHTS,
        "optimizer state": 2 * WEIGHTS,
        "activations": _batch(BATCH // 2),
        "communication": bucket,
        "temporaries": SCALAR + 2 * WEIGHTS,
    }
    assert ranks(2).run(_peaks_of_rank, wrapper) == [[expected], [expected]]


def test_basic_net_is_accounted_for_as_level_01_is():
    flags = [*SHORT, "--train-samples", "192", "--batch-size", "64", "--replicas", "2"]
    of_level = totals(level_runs.peaks("01_data_parallel", flags))
    ours = memory.peaks_of_process("basic_net", DATA_PARALLEL, 2)
    assert totals(ours) == pytest.approx(of_level, rel=0.005)


@pytest.mark.slow
def test_only_data_parallel_is_uneven_and_fsdp_lowers_what_ddp_evens():
    rows = {row.wrapper: row for row in memory.rows_on(4, ["basic_net"], memory.WRAPPERS)}
    for wrapper, row in rows.items():
        uneven = imbalance(totals(row.peaks))
        assert uneven > 1.5 if wrapper == DATA_PARALLEL else uneven <= MOST_IMBALANCE, wrapper
    of_ddp, of_fsdp = rows[DDP], rows[FSDP2]
    assert max(totals(of_fsdp.peaks)) < 0.65 * min(totals(of_ddp.peaks))
    state = [row.peaks[0]["optimizer state"] for row in (of_ddp, of_fsdp)]
    assert state[1] == pytest.approx(state[0] / 4, rel=0.01)


def test_gathered_outputs_hurt_the_first_device():
    for_dp, for_ddp = memory.rows_on(2, ["big_output"], (DATA_PARALLEL, DDP))
    for row, wrapper in ((for_dp, DATA_PARALLEL), (for_ddp, DDP)):
        assert row.wrapper == wrapper and [list(peak) for peak in row.peaks] == [list(CATEGORIES)] * 2
    assert imbalance(totals(for_ddp.peaks)) <= 1.01 and imbalance(totals(for_dp.peaks)) > 2
    network = NETWORKS["big_output"]
    outputs = network.batch_size * network.classes * FLOAT
    assert for_dp.peaks[0]["communication"] >= outputs


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: compares with CUDA's allocator")
@pytest.mark.parametrize("network", ["big_output", "basic_net"])
def test_the_accounting_agrees_with_the_allocator_of_a_gpu(network):
    """Workspaces of the libraries are left out: cuBLAS keeps one, cuDNN takes one during a convolution."""
    train = partial(memory.train, NETWORKS[network], torch.device("cuda"), memory.WRAPPERS[DATA_PARALLEL], 1)
    with torch.backends.cudnn.flags(enabled=False):
        train()  # libraries take what they keep
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        train()
    gc.collect()
    held = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    workspaces = held - torch.cuda.memory_allocated()
    peak = torch.cuda.max_memory_allocated() - before - workspaces
    (simulated,) = memory.peaks_of_process(network, DATA_PARALLEL, 1)
    assert peak == pytest.approx(sum(simulated.values()), rel=0.05)
