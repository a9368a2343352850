"""The gain of overlap, buckets, no_sync and compression between two real nodes."""

from benchmarks.harness.gradient_averaging import ALONE
from benchmarks.harness.groups import keyed
from benchmarks.suites import overlap

GROUPS = keyed(overlap.groups())


def test_backward(group_key, row, replay):
    facts = replay(group_key, row)
    # Only ranks that average nothing may have nothing to send.
    assert facts["bytes_per_backward"] > 0 or row == ALONE
