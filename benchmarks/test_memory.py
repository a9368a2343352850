"""Where the memory of a training step goes, device by device."""

import pytest

from benchmarks import memory
from benchmarks.networks import NETWORKS
from benchmarks.verdicts import MOST_SPREAD, spread


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_peak_memory_per_device(devices, benchmark, capsys):
    rows = benchmark.pedantic(memory.measure, args=(list(NETWORKS), [devices]), rounds=1)
    benchmark.group = f"peak memory, {devices} device{'s' * (devices > 1)}"
    benchmark.extra_info["memory"] = rows
    with capsys.disabled():
        print(f"\n{benchmark.group}, {', '.join(sorted({row['source'] for row in rows}))}\n{memory.table(rows)}")
    for row in rows:
        assert len(row["peaks"]) == devices
        uneven = spread(memory.totals(row))
        balanced = row["wrapper"] == "DDP" or devices == 1
        assert uneven <= MOST_SPREAD if balanced else uneven > 1.5, row["title"]
