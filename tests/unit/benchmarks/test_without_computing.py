"""Training without computing: what has no memory is never computed with, nor are its numbers read."""

from pathlib import Path

import pytest
import torch

from benchmarks.harness.rows import ONE_DEVICE
from benchmarks.your_network.errors import StepFailed
from benchmarks.your_network.spec import load
from benchmarks.your_network.strategies import Setting
from benchmarks.your_network.without_computing import without_computing
from common.memory import track_memory
from tests.unit.benchmarks.example_networks import simulated_peaks

OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")


@pytest.mark.skipif(
    OVERCOMMIT.exists() and OVERCOMMIT.read_text().strip() == "2",
    reason="this system gives no more address space than it has memory",
)
def test_tensors_larger_than_the_machine_need_no_memory():
    """They have 2**42 elements, in 16 TiB. One is charged to a device, as each batch that a training moves."""
    with without_computing(), track_memory() as tracker:
        on_device = torch.zeros(2**21, 2**21).to("cpu")
        product = on_device @ on_device
    assert product.shape == (2**21, 2**21)
    assert tracker.device_of(on_device) == tracker.device_of(product) == 0
    assert on_device.untyped_storage().nbytes() == product.untyped_storage().nbytes() == 2**44


@pytest.mark.parametrize("rows", [2, 2**15])
def test_a_network_whose_shapes_depend_on_numbers_is_refused(rows, write_network):
    spec = write_network(
        "class Chosen(nn.Linear):\n"
        "    def forward(self, x): return super().forward(x[x[:, 0] > 0])\n"
        "def build(): return Chosen(64, 3)\n"
        "def batch(n): return torch.randn(n, 64), torch.zeros(n).long()\n"
    )
    with pytest.raises(StepFailed, match="depends on numbers"):
        simulated_peaks(load(spec), Setting(ONE_DEVICE, 1), rows)


def test_a_small_part_of_a_large_tensor_is_not_computed_with():
    """Its memory is nobody's: as indices it would point anywhere."""
    unwritten = torch.full((10_000,), 10**12)
    with without_computing():
        tokens = unwritten.chunk(1000)[1]
        assert torch.zeros(50, 4)[tokens].shape == (10, 4)
        assert tokens.clone().max() == 0
        assert tokens.clone().new_empty(3).max() == 0


def test_a_check_of_numbers_that_are_not_there_raises_nothing():
    """torch.linalg.cholesky ends with this check of the error code of each matrix."""
    errors = torch.ones(10_000, dtype=torch.int32)
    with without_computing():
        torch.ops.aten._linalg_check_errors(errors, "linalg.cholesky", is_matrix=False)


def test_a_shape_that_does_not_fit_is_raised_and_not_logged_too(caplog):
    with without_computing(), pytest.raises(RuntimeError, match="same reduction dim"):
        torch.zeros(100, 100) @ torch.zeros(99, 100)
    assert not caplog.records
