"""DDP's step between two real nodes, against the bandwidth of the link."""

from benchmarks.harness.groups import keyed
from benchmarks.suites import network

GROUPS = keyed(network.groups())


def test_step(group_key, row, replay):
    replay(group_key, row)
