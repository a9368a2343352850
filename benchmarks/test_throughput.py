"""How many images per second each level trains, and how that scales."""

import pytest

from benchmarks import throughput


@pytest.mark.parametrize("batch_size", [64, 256])
def test_strong_scaling(batch_size, in_turns, keep, quick, data_flags):
    rows = throughput.Throughput(throughput.strong_scaling(batch_size), 0.2 if quick else 1.0, data_flags)
    samples = in_turns(rows.contestants, 2 if quick else 5)
    keep(throughput.strong_scaling_record(batch_size, samples, rows.facts))


def test_weak_scaling(in_turns, keep, quick, data_flags):
    rows = throughput.Throughput(throughput.weak_scaling(64), 0.2 if quick else 1.0, data_flags)
    samples = in_turns(rows.contestants, 2 if quick else 8)
    keep(throughput.weak_scaling_record(64, samples, rows.facts))
