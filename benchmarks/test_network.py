"""DDP's throughput between two real nodes, against the bandwidth of the link."""

import pytest

from benchmarks import network, two_nodes


@pytest.mark.skipif(two_nodes.why_not() is not None, reason=f"no two nodes: {two_nodes.why_not()}")
def test_throughput_against_bandwidth(in_turns, keep, quick):
    batches, steps, rounds = network.QUICK if quick else network.FULL
    with network.network() as net:
        samples = in_turns(network.contestants(net, batches, steps), rounds)
        record = network.record(net, samples, batches)
    for name, row in record["rows"].items():
        if limit := row["nominal_bits_per_sec"]:
            # Headers take some 5 %; the first burst and what waits in the buffers are not throttled.
            assert row["tcp_bits_per_sec"] < 1.3 * limit, name
    keep(record)
