"""The memory accounting on cases whose every byte can be counted by hand, and on the levels."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from benchmarks.harness import level_runs
from common import ladder
from common.memory import CATEGORIES, MemoryTracker, track_memory, tracked_copy
from common.model import BasicNet
from common.process_group import process_group
from common.processes import ranks
from tests.levels import SHORT

DEVICE = torch.device("cpu")
FLOAT = 4


def bytes_on(tracker: MemoryTracker, device: int = 0) -> int:
    return sum(tracker.now(device).values())


def test_a_tensor_is_charged_when_it_moves_and_released_when_it_dies():
    with track_memory() as tracker:
        on_host = torch.ones(1000)
        assert bytes_on(tracker) == 0
        on_device = on_host.to(DEVICE)
        assert bytes_on(tracker) == 4096  # 4000 bytes in blocks of 512
        view = on_device[10:].view(-1, 10)
        assert bytes_on(tracker) == 4096
        del on_device
        assert bytes_on(tracker) == 4096
        del view
        assert bytes_on(tracker) == 0
    assert sum(tracker.peaks()[0].values()) == 4096


def test_results_live_where_their_inputs_live():
    with track_memory() as tracker:
        tensor = torch.ones(128).to(DEVICE)
        assert tensor.to(DEVICE) is tensor
        doubled = tensor * 2
        assert tracker.device_of(doubled) == 0 and bytes_on(tracker) == 1024
        tensor.add_(1)
        tensor.copy_(torch.ones(128))  # The source of a copy stays on the host.
        assert bytes_on(tracker) == 1024
        elsewhere = tracked_copy(doubled, 0, 3)
        assert tracker.device_of(elsewhere + 1) == 3
        assert (bytes_on(tracker, 0), bytes_on(tracker, 3)) == (1024, 512)


def test_a_batch_used_without_a_move_is_taken_to_have_moved():
    batch = torch.ones(256)
    with track_memory() as tracker:
        weight = torch.ones(256).to(DEVICE)
        total = (batch * weight).sum()
        assert (tracker.device_of(total), bytes_on(tracker)) == (0, 2 * 1024 + 512)  # The product was released.


def test_storage_that_is_resized_without_an_operation_is_followed():
    with track_memory() as tracker:
        kept = torch.ones(128).to(DEVICE)
        gathered = kept.clone()
        gathered.untyped_storage().resize_(0)
        assert bytes_on(tracker) == 512
        gathered.untyped_storage().resize_(4096)
        assert bytes_on(tracker) == 512 + 4096
        del gathered
        assert bytes_on(tracker) == 512


def test_the_gradient_of_a_copy_flows_back_over_the_same_way():
    with track_memory() as tracker:
        weight = torch.ones(512).to(DEVICE).requires_grad_()
        replica = tracked_copy(weight, 0, 1, "parameters")
        (replica * 2).sum().backward()
        assert tracker.device_of(weight.grad) == 0
        optimizer = torch.optim.SGD([weight], lr=1.0)
        optimizer.step()
        assert not optimizer.state, "an optimizer without a state still has none"
        del replica
        assert bytes_on(tracker, 1) == 0
    assert tracker.peaks()[1]["parameters"] == 2048 and tracker.peaks()[1]["gradients"] >= 2048


def test_a_shard_moves_once_and_what_a_collective_fills_is_communication():
    with process_group("gloo", store=dist.HashStore(), rank=0, world_size=1), track_memory() as tracker:
        shard = DTensor.from_local(torch.ones(128), dist.init_device_mesh("cpu", (1,))).to(DEVICE)
        assert shard.to(DEVICE) is shard
        dist.all_gather_into_tensor(torch.empty(128), shard.to_local())
    assert tracker.peaks()[0] == dict.fromkeys(CATEGORIES, 0) | {"communication": 2 * 512}


def test_only_one_tracker_at_a_time_and_none_after_an_error():
    with pytest.raises(ZeroDivisionError), track_memory():
        with pytest.raises(RuntimeError, match="active already"), track_memory():
            pass
        _ = 1 / 0
    with track_memory() as tracker:
        assert tracker.peaks() == {}


FOUR_STEPS = [*SHORT, "--train-samples", "48"]
ROWS = [32, 32, 64, 64, 128, 128, 10, 10]  # Of each parameter of BasicNet, along the dimension that is divided.


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_ranks_of_fsdp_hold_one_copy_together(world_size):
    """The sums differ by blocks of 512 bytes, and by the rows that fill a parameter up to equal parts."""
    whole = level_runs.held("00_single_gpu", FOUR_STEPS)
    parts = ranks(world_size).run(level_runs.held, ladder.FSDP, FOUR_STEPS)
    sizes = [parameter.numel() * FLOAT for parameter in BasicNet().parameters()]
    padding = 0
    for rows, size in zip(ROWS, sizes, strict=True):
        padding += size // rows * (-rows % world_size)
    for category, tensors in (("parameters", 8), ("gradients", 8), ("optimizer state", 16)):
        of_all_ranks = sum(part[category] for part in parts)
        copies = tensors // 8
        assert sum(sizes) * copies <= whole[category] <= sum(sizes) * copies + tensors * 512, category
        assert sum(sizes) * copies <= of_all_ranks, category
        assert of_all_ranks <= (sum(sizes) + padding) * copies + world_size * tensors * 512, category


@pytest.mark.slow
def test_on_a_mesh_the_ranks_of_a_row_divide_the_linear_layers_only():
    parts = ranks(4).run(level_runs.held, ladder.MESH, [*FOUR_STEPS, "--tensor", "2"])
    convolutions, linear = 18_816, 1_181_066
    for part in parts:
        assert part["parameters"] == pytest.approx((convolutions / 2 + linear / 4) * FLOAT, abs=10 * 512)
        assert part["optimizer state"] == pytest.approx((convolutions + linear / 2) * FLOAT, abs=20 * 512)
