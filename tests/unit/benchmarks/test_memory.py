"""Memory per device: a step counted by hand, and what the wrappers do to three networks."""

import os
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from benchmarks.harness.networks import NETWORKS, Network
from benchmarks.report.verdicts import spread
from benchmarks.suites import memory
from common import ladder
from common.args import parse_args
from common.memory import CATEGORIES, accounting
from common.model import BasicNet
from common.process_group import process_group
from common.processes import RankFailed, ranks
from common.small.data_parallel import EmulatedDataParallel
from tests.levels import SHORT

FLOAT, LABEL, SCALAR = 4, 8, 512  # bytes; a scalar fills a block
INPUTS, OUTPUTS, BATCH = 128, 64, 32


def _linear() -> nn.Module:
    return nn.Linear(INPUTS, OUTPUTS, bias=False)


LINEAR = Network("linear", _linear, (INPUTS,), OUTPUTS, BATCH)
WEIGHTS = INPUTS * OUTPUTS * FLOAT


def _peaks(wrapper: str, devices: int) -> list[dict]:
    with accounting() as ledger:
        memory.train(LINEAR, torch.device("cpu"), memory.Share(wrapper, devices))
    return list(ledger.peaks().values())


def _peaks_of_rank(wrapper: str) -> list[dict]:
    with process_group():
        return _peaks(wrapper, dist.get_world_size())


def _batch(samples: int) -> int:
    """The images and the labels of a batch, which the loss and the layer save for backward."""
    return samples * INPUTS * FLOAT + max(samples * LABEL, SCALAR)


def test_a_whole_step_on_one_device_is_counted_to_the_byte():
    """The peak is in AdamW: the root of the second moment, and that divided by its correction. The loss is alive."""
    assert _peaks("DataParallel", 1) == [
        {
            "parameters": WEIGHTS,
            "gradients": WEIGHTS,
            "optimizer state": 2 * WEIGHTS,
            "activations": _batch(BATCH),
            "communication": 0,
            "temporaries": SCALAR + 2 * WEIGHTS,
        }
    ]


def test_a_whole_step_of_data_parallel_is_counted_to_the_byte():
    """The first device's peak is where gradients meet: its own, the other replica's, and their sum.

    Temporaries are one of the three, the loss, and the gradient 1 that backward starts from. The second device's is
    forward: the weights' copy, its half of the batch, its outputs; the labels stay where the loss is.
    """
    first, second = _peaks("DataParallel", 2)
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


@pytest.mark.parametrize("wrapper, bucket", [(memory.DDP, WEIGHTS), (memory.BUCKET_VIEWS, 0)])
def test_a_whole_step_of_ddp_is_counted_to_the_byte_on_each_rank(wrapper, bucket):
    """As on one device with half the batch, and a bucket as large as the gradients.

    With views of buckets gradients are there once: from the second step on the two are one storage.
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


def _held_between_steps() -> list[int]:
    with process_group(), accounting() as ledger:
        model = memory.Share(memory.FSDP, 2).wrap(LINEAR, torch.device("cpu"))
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        held = []
        for _ in range(2):
            images = torch.ones(BATCH, INPUTS).to(torch.device("cpu"))
            model(images).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            del images
            time.sleep(0.1)  # gloo's threads let go of the messages
            held.append(ledger.current())
        return held


def test_between_steps_a_rank_of_fsdp_holds_its_part_to_the_byte():
    """Half of the weights, and of AdamW's two averages: what was gathered for the step has been freed."""
    part = WEIGHTS // 2
    assert ranks(2).run(_held_between_steps) == [[3 * part] * 2, [3 * part] * 2]


class _InDoublePrecision(nn.Module):
    """BasicNet without dropout, whose steps by several ranks end at the same weights but for the last digits."""

    def __init__(self) -> None:
        super().__init__()
        self.network = BasicNet(dropout=False).double()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.network(images.double())


def _weights(wrapper: str) -> torch.Tensor:
    """On a rank: the weights that a few steps left."""
    kept = []
    network = replace(NETWORKS["basic_net"], build=lambda: kept.append(_InDoublePrecision()) or kept[0])
    with process_group():
        memory.train(network, torch.device("cpu"), memory.Share(wrapper, dist.get_world_size()))
        whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in kept[0].parameters()]
        return torch.cat([p.detach().flatten() for p in whole])


def test_fsdp_trains_as_ddp_does():
    expected, _ = ranks(2).run(_weights, memory.DDP)
    weights, _ = ranks(2).run(_weights, memory.FSDP)
    assert torch.allclose(weights, expected, rtol=0, atol=1e-9)


@pytest.mark.slow
def test_fsdp_lowers_what_ddp_evens():
    rows = memory.rows_on(4, ["basic_net"], (memory.DDP, memory.FSDP))
    of_ddp, of_fsdp = (memory.accounted_totals(row) for row in rows)
    assert spread(of_fsdp) <= 1.01
    assert max(of_fsdp) < 0.65 * min(of_ddp)
    state = [row["peaks"][0]["optimizer state"] for row in rows]
    assert state[1] == pytest.approx(state[0] / 4, rel=0.01)


def test_basic_net_is_accounted_for_as_level_01_is():
    module = ladder.load("01_data_parallel")
    args = parse_args(module.__file__, [*SHORT[:-1], "64", "--replicas", "2", "--max-steps", "3"])
    with accounting() as ledger:
        module.train(args)
    (ours,) = memory.accounted(["basic_net"], memory.Share("DataParallel", 2))
    of_level = [sum(peak.values()) for peak in ledger.peaks().values()]
    assert [sum(peak.values()) for peak in ours] == pytest.approx(of_level, rel=0.005)


def test_the_rows_say_where_their_numbers_come_from_and_gathered_outputs_hurt_the_first_device():
    rows = memory.rows_on(2, ["big_output"])
    for_dp, for_ddp = rows
    assert [row["wrapper"] for row in rows] == ["DataParallel", "DDP"]
    assert all(len(row["peaks"]) == 2 and list(row["peaks"][0]) == list(CATEGORIES) for row in rows)
    two_gpus = torch.cuda.device_count() >= 2
    assert {row["source"] for row in rows} == {"measured" if two_gpus else "simulated"}
    assert all((row["allocated"] is not None) == two_gpus for row in rows)
    assert spread(memory.accounted_totals(for_ddp)) <= 1.01 and spread(memory.accounted_totals(for_dp)) > 2
    network = NETWORKS["big_output"]
    outputs = network.batch_size * network.classes * FLOAT
    # All outputs, their log-probabilities and a gradient of either, against half of that on each rank.
    names = ("activations", "communication", "temporaries")
    of_dp = sum(for_dp["peaks"][0][name] for name in names)
    of_ddp = sum(for_ddp["peaks"][0][name] for name in names)
    assert of_dp >= 2.9 * outputs
    assert of_ddp <= 2.2 * outputs
    assert for_dp["peaks"][0]["communication"] >= outputs
    assert all(len(line) <= 80 for line in memory.table(rows))


@pytest.mark.parametrize(
    ("device", "devices", "gpus"),
    [("cuda:0", 2, [0, 1]), ("cuda:0", 3, [0, 1, 2]), ("cuda:0", 1, None), ("cpu", 2, None)],
)
def test_replicas_that_are_measured_lie_on_a_gpu_each(monkeypatch, device, devices, gpus):
    """The emulation's would all lie on the first, and the others would seem to hold nothing."""
    monkeypatch.setattr(nn, "DataParallel", lambda model, device_ids: device_ids)
    monkeypatch.setattr(nn.Linear, "to", lambda model, device: model)
    wrapped = memory.Share("DataParallel", devices).wrap(LINEAR, torch.device(device))
    if gpus is None:
        assert isinstance(wrapped, EmulatedDataParallel)
    else:
        assert wrapped == gpus


def test_what_the_network_before_left_is_freed_before_a_peak_begins(monkeypatch):
    called = []
    monkeypatch.setattr(memory, "train", lambda *_, steps=memory.STEPS: called.append(f"{steps} steps"))
    monkeypatch.setattr(memory.gc, "collect", lambda: called.append("collect"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: called.append("empty"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda index: called.append(f"reset {index}"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda index: 100 + index)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda index: 8 * kept["workspaces"])
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: kept.update(workspaces=0), raising=False)
    kept = {"workspaces": 1}
    first, second = memory.allocated(["basic_net", "big_output"], memory.Share("DataParallel", 2))
    assert first == [(92, 8), (93, 8)], "cuBLAS's workspaces are told apart"
    assert second == [(100, 0), (101, 0)]
    assert called == ["1 steps", "collect", "empty", "reset 0", "reset 1", "3 steps"] * 2


def _fail_on_rank_1(names, share):
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def test_a_rank_that_dies_ends_the_measurement():
    with pytest.raises(RankFailed, match="rank 1: the process ended with exit code 3"):
        memory.on_devices(_fail_on_rank_1, ["basic_net"], memory.DDP, 2, "gloo")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: compares with CUDA's allocator")
@pytest.mark.parametrize("network", ["big_output", "basic_net"])
def test_the_accounting_agrees_with_the_allocator_of_a_gpu(network):
    """But for what the libraries take beside: cuBLAS keeps a workspace, cuDNN takes one during a convolution."""
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    with torch.backends.cudnn.flags(enabled=False):
        ((peak,),) = memory.allocated([network], memory.Share("DataParallel", 1))
    (((simulated,), _),) = memory.accounted([network], memory.Share("DataParallel", 1))
    assert peak.allocated - before == pytest.approx(sum(simulated.values()), rel=0.05)
