"""The cost of a batch before it is trained on."""

from benchmarks.harness.groups import keyed
from benchmarks.suites import loading

GROUPS = keyed(loading.groups())


def test_batch(group_key, row, replay):
    replay(group_key, row)
