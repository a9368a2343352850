"""Two nodes, their cable, their ranks and their end."""

import os
import socket
import subprocess
import sys

import pytest

from benchmarks.harness import level_runs
from benchmarks.harness.node_ranks import run_on_nodes
from benchmarks.harness.two_nodes import ADDRESSES, INTERFACE, two_nodes
from benchmarks.suites import network
from common.processes import RankFailed


@pytest.mark.slow
@pytest.mark.usefixtures("needs_two_nodes")
def test_two_nodes_can_throttle_their_cable_and_leave_nothing_behind():
    with pytest.raises(ZeroDivisionError), two_nodes() as nodes:
        assert set(nodes.names) <= _namespaces()
        nodes.limit(2e6)
        assert _seconds_for_a_megabyte(nodes) > 3.8  # 8 Mbit, less a burst of 0.13 Mbit
        nodes.limit(None)
        _seconds_for_a_megabyte(nodes)  # It comes to its end.
        sleeper = _start(nodes.names[1], "sh", "-c", "echo here; exec sleep 1000")
        assert sleeper.stdout.readline() == "here\n"
        raise ZeroDivisionError
    assert sleeper.wait(10) == -9
    assert not set(nodes.names) & _namespaces()


@pytest.mark.slow
@pytest.mark.usefixtures("needs_two_nodes")
def test_ranks_run_jobs_on_two_nodes_also_after_one_has_failed(capfd):
    with two_nodes() as nodes, run_on_nodes(nodes.names[:1]) as one, run_on_nodes(nodes.names) as pair:
        assert network.images_per_second(network.LinkRow(4, "unlimited"), nodes, pair) > 0
        assert network.images_per_second(network.LinkRow(4, None), nodes, one) > 0
        with pytest.raises(RankFailed, match="rank 0: --replicas belongs to"):
            pair(level_runs.run_level, "00_single_gpu", ["--replicas", "2"], timeout=100)
        first, second = pair(os.sched_getaffinity, 0, timeout=100)
        assert len(first) == len(second) == 1 and first != second
        interfaces = pair(socket.if_nameindex, timeout=100)
        assert interfaces == [[(1, "lo"), (2, INTERFACE)]] * 2
    assert capfd.readouterr().err == ""


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


def _start(node: str, *command: str) -> subprocess.Popen:
    return subprocess.Popen(["ip", "netns", "exec", node, *command], stdout=subprocess.PIPE, text=True)


def _seconds_for_a_megabyte(nodes) -> float:
    receiver = _start(nodes.names[0], sys.executable, "-c", _RECEIVE)
    assert receiver.stdout.readline() == "listening\n"
    assert _start(nodes.names[1], sys.executable, "-c", _SEND).wait(60) == 0
    seconds, _ = receiver.communicate(timeout=60)
    return float(seconds)
