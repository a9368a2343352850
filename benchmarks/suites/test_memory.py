"""Where the memory of a training step goes, device by device."""

import pytest

from benchmarks.harness.networks import NETWORKS
from benchmarks.report.verdicts import MOST_SPREAD, spread
from benchmarks.suites import memory


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_peak_memory_per_device(devices, keep_memory):
    rows = memory.measure(list(NETWORKS), [devices], wrappers=memory.ALL_WRAPPERS)
    keep_memory(rows)
    for row in rows:
        assert len(row["peaks"]) == devices
        # On GPUs cuBLAS and cuDNN take tens of MiB on every device, and make devices alike that hold different tensors.
        uneven = spread(memory.accounted_totals(row))
        if row["wrapper"] == memory.DATA_PARALLEL and devices > 1:
            assert uneven > 1.5, row["title"]
        else:
            assert uneven <= MOST_SPREAD, row["title"]
