"""The memory of a training step, device by device."""

import pytest

from benchmarks.harness.networks import NETWORKS
from benchmarks.report.verdicts import MOST_SPREAD, spread
from benchmarks.suites import memory


@pytest.fixture
def rows(devices, quick) -> list[dict]:
    """The rows on so many devices."""
    networks = list(NETWORKS)
    if quick and devices > 1:
        # The ranks of many devices take turns on a few cores: a quick look is at one network there.
        networks = ["basic_net"]
    return memory.measure(networks, [devices], wrappers=memory.ALL_WRAPPERS)


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_peak_memory_per_device(devices, rows, keep_memory):
    keep_memory(rows)
    for row in rows:
        assert len(row["peaks"]) == devices
        # On GPUs cuBLAS and cuDNN take tens of MiB on every device, and make devices alike that hold different tensors.
        uneven = spread(memory.accounted_totals(row))
        if row["wrapper"] == memory.DATA_PARALLEL and devices > 1:
            assert uneven > 1.5, row["title"]
        else:
            assert uneven <= MOST_SPREAD, row["title"]
