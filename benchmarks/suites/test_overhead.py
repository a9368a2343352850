"""The time that an abstraction adds to a training step."""

from benchmarks.harness.groups import keyed
from benchmarks.suites import overhead

GROUPS = keyed(overhead.groups())


def test_step(group_key, row, replay):
    replay(group_key, row)
