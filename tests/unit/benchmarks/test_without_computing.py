"""Training without computing: what has no memory is never computed with, nor are its numbers read."""

from pathlib import Path

import pytest
import torch

from benchmarks.harness.rows import ONE_DEVICE
from benchmarks.your_network.errors import StepFailed
from benchmarks.your_network.settings import Setting
from benchmarks.your_network.without_computing import without_computing
from common.memory import track_memory
from tests.unit.benchmarks.user_network import need

ALONE = Setting(ONE_DEVICE, 1)
OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
LARGE = pytest.mark.skipif(
    OVERCOMMIT.exists() and OVERCOMMIT.read_text().strip() == "2",
    reason="this system gives no more address space than it has memory",
)


@LARGE
def test_a_tensor_larger_than_the_machine_needs_no_memory():
    """It has 2**42 elements, in 16 TiB."""
    with without_computing():
        large = torch.zeros(2**21, 2**21)
        product = large @ large
    assert product.shape == large.shape
    assert product.untyped_storage().nbytes() == 2**44


@LARGE
def test_a_copy_that_is_charged_to_a_device_needs_no_memory():
    """As each batch that a training moves, and each replica of DataParallel."""
    with without_computing(), track_memory() as tracker:
        moved = torch.zeros(2**21, 2**21).to("cpu")
    assert tracker.device_of(moved) == 0
    assert moved.untyped_storage().nbytes() == 2**44


@pytest.mark.parametrize("rows", [2, 2**15])
def test_a_network_whose_shapes_depend_on_numbers_is_refused(rows, network_of):
    network = network_of(
        "class Chosen(nn.Linear):\n"
        "    def forward(self, x): return super().forward(x[x[:, 0] > 0])\n"
        "def build(): return Chosen(64, 3)\n"
        "def batch(n): return torch.randn(n, 64), torch.zeros(n).long()\n"
    )
    with pytest.raises(StepFailed, match="DependsOnNumbers"):
        need(network, ALONE, rows)


def test_a_small_part_of_a_large_tensor_is_not_computed_with():
    """Its memory is nobody's: as indices it would point anywhere."""
    unwritten = torch.full((10_000,), 10**12)
    with without_computing():
        tokens = unwritten.chunk(1000)[1]
        assert torch.zeros(50, 4)[tokens].shape == (10, 4)
        assert tokens.clone().max() == 0
        assert tokens.clone().new_empty(3).max() == 0


def test_a_shape_that_does_not_fit_is_raised_and_not_logged_too(caplog):
    with without_computing(), pytest.raises(RuntimeError, match="same reduction dim"):
        torch.zeros(100, 100) @ torch.zeros(99, 100)
    assert not caplog.records
