"""DDP's step between two real nodes, against the bandwidth of the link."""

from benchmarks.harness.groups import keyed
from benchmarks.suites import network

GROUPS = keyed(network.groups())


def test_step(group_key, row, replay):
    facts = replay(group_key, row)
    limit = facts["nominal_bits_per_sec"]
    if limit:
        # Headers take some 5 %, which is more than the first burst adds.
        assert facts["tcp_bits_per_sec"] < limit
