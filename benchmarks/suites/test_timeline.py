"""The work of every thread during one step."""

from benchmarks.harness.groups import keyed
from benchmarks.suites import timeline

GROUPS = keyed(timeline.groups())


def test_step(group_key, row, replay):
    replay(group_key, row)
