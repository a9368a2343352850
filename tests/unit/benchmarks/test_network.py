"""Two nodes, their cable, their ranks and their end; and the record of DDP on them."""

import os
import subprocess
import sys

import pytest

from benchmarks.harness import level_runs
from benchmarks.harness.node_ranks import node_ranks
from benchmarks.harness.two_nodes import ADDRESSES, two_nodes
from benchmarks.suites import network


def test_two_nodes_are_held_against_one_in_the_record():
    samples = {network.row_name(name, 64): [1000.0, 1100.0, 1200.0] for name in network.BANDWIDTHS}
    samples[network.one_node(64)] = [500.0, 1100.0, 400.0]  # round by round half, all, and a third of it
    assert [pair["median"] for pair in network.record(samples)["pairs"]] == [2.0] * len(network.BANDWIDTHS)


@pytest.mark.slow
@pytest.mark.usefixtures("needs_two_nodes")
def test_two_nodes_can_throttle_their_cable_and_leave_nothing_behind():
    with pytest.raises(ZeroDivisionError), two_nodes() as nodes:
        assert set(nodes.names) <= _namespaces()
        assert _seconds_for_a_megabyte(nodes) < 5
        nodes.limit(2e6)
        assert _seconds_for_a_megabyte(nodes) > 3.8  # 8 Mbit, less a burst of 0.13 Mbit
        sleeper = nodes.start(1, ["sleep", "1000"])
        raise ZeroDivisionError
    assert sleeper.wait(10) == -9
    assert not set(nodes.names) & _namespaces()


@pytest.mark.slow
@pytest.mark.usefixtures("needs_two_nodes")
def test_ranks_on_two_nodes_run_one_job_after_another_until_one_ends(capfd):
    with node_ranks() as pair:
        assert pair.run(os.getenv, "RANK", timeout=100) == ["0", "1"]
        assert pair.run(divmod, 7, 2, timeout=100) == [(3, 1), (3, 1)]
        with pytest.raises(RuntimeError, match="no answer of node 0"):
            pair.run(level_runs.train, "00_single_gpu", ["--replicas", "2"], 1, timeout=100)
    assert "error: --replicas belongs to" in capfd.readouterr().err


def _namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines()}


_RECEIVE = """
import socket, time
with socket.create_server(("", 7000)) as server:
    print("listening", flush=True)
    connection = server.accept()[0]
    began = time.perf_counter()
    while connection.recv(1 << 20): pass
    print(time.perf_counter() - began)
"""
_SEND = f"import socket; socket.create_connection(('{ADDRESSES[0]}', 7000)).sendall(bytes(1_000_000))"


def _seconds_for_a_megabyte(nodes) -> float:
    receiver = nodes.start(0, [sys.executable, "-c", _RECEIVE], stdout=subprocess.PIPE)
    assert receiver.stdout.readline() == "listening\n"
    assert nodes.start(1, [sys.executable, "-c", _SEND]).wait(60) == 0
    said, _ = receiver.communicate(timeout=60)
    return float(said)
