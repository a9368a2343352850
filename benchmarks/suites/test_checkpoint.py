"""The time to save and to load a training, beside accelerate's and torch's."""

from benchmarks.harness.groups import keyed
from benchmarks.suites import checkpoint

GROUPS = keyed(checkpoint.groups())


def test_checkpoint(group_key, row, replay):
    replay(group_key, row)
