"""What starting costs."""

from benchmarks.harness.groups import keyed
from benchmarks.suites import launch

GROUPS = keyed(launch.groups())


def test_start(group_key, row, replay):
    replay(group_key, row)
