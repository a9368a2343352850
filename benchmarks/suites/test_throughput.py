"""The seconds that a step takes at each level, and how that scales."""

from benchmarks.harness.groups import keyed
from benchmarks.suites import throughput

GROUPS = keyed(throughput.groups())


def test_step(group_key, row, replay):
    replay(group_key, row)
