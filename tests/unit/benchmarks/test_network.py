"""The model of a step over a network, by hand; the two nodes, their cable and their end; and the plots' input."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, replace

import pytest

from benchmarks.harness import records
from benchmarks.harness.two_nodes import ADDRESSES, burst_bytes, two_nodes, why_not
from benchmarks.report import network_plot
from benchmarks.suites import network
from benchmarks.suites.network import Calibration, buckets
from common import ladder

# 100 ms of compute, 40 of them left when the large bucket of 4 MB starts; 1 ms a message. One node alone takes 80 ms.
MODEL = Calibration(compute=0.1, window=0.4, latency=0.001, large=4_000_000, small=100_000, alone=0.08)
TWO_NODES = pytest.mark.skipif(why_not() is not None, reason=f"no two nodes: {why_not()}")


def test_the_buckets_hold_every_gradient_once():
    assert sum(buckets()) == 4 * 1_199_882
    assert buckets() == (4 * (9216 * 128 + 128 + 128 * 10 + 10), 4 * (32 * 9 + 32 + 64 * 32 * 9 + 64))


def test_a_step_is_compute_and_what_backward_does_not_hide():
    # On two nodes each bucket goes over the cable once each way: 32 Mbit and 0.8 Mbit, and two messages.
    assert MODEL.step(100e6) == pytest.approx(0.1 + (0.32 + 0.002 - 0.04) + (0.008 + 0.002))
    assert MODEL.step(100e6, overlap=False) == pytest.approx(0.1 + 0.322 + 0.010)
    assert MODEL.step(1e9) == pytest.approx(0.1 + 0 + 0.0028)  # 34 ms of 40 are hidden


def test_many_nodes_send_almost_twice_the_bytes_and_wait_for_more_messages():
    assert MODEL.step(100e6, nodes=4) == pytest.approx(0.1 + (1.5 * 0.32 + 0.006 - 0.04) + (1.5 * 0.008 + 0.006))
    efficiencies = [MODEL.efficiency(1e9, nodes) for nodes in (1, 2, 64, 4096)]
    assert efficiencies == sorted(efficiencies, reverse=True) and efficiencies[0] == 1


def test_perfect_is_a_node_that_never_waits_for_the_network_and_a_shared_memory_is_not_carried_to_more_nodes():
    assert MODEL.efficiency(1e30, 2) == pytest.approx(0.1 / (0.1 + 0.004 - 0.002))
    assert replace(MODEL, alone=0.05).efficiency(1e9, 64) == MODEL.efficiency(1e9, 64)


class Waiting:
    """Two nodes that have measured: a latency of 1 ms a message, and 40 % of a step left for the large bucket."""

    def __init__(self):
        self.rates = {name: [limit or 2e10] for name, limit in network.BANDWIDTHS.items()}
        self.facts = {}

    def limit(self, name):
        assert name == network.CALIBRATED_AT

    def ask(self, job, **_):
        return {"latency": [0.002, 0.001], "window": [0.4, 0.4]}[job]


def test_the_record_holds_two_nodes_against_one_that_was_measured_and_marks_where_the_model_is_calibrated():
    samples = {row: [1000.0, 1100.0, 1200.0] for row in network.rows_of(64)}
    samples[network.one_node(64)] = [500.0, 1100.0, 400.0]
    record = network.record(Waiting(), samples, (64,))
    assert record["calibration"]["64"]["alone"] == pytest.approx(64 / 500)
    assert len(record["pairs"]) == len(network.BANDWIDTHS)
    unlimited, *_ = record["pairs"]
    assert (unlimited["to"], unlimited["median"]) == (network.one_node(64), 2.0)
    calibrated = [name for name, row in record["rows"].items() if row.get("calibrated_here")]
    assert calibrated == [network.row_name("unlimited", 64)]
    marked = [note for note in record["notes"] if note.startswith("  ") and "=" in note]
    assert len(marked) == 1 and "unlimited" in marked[0]
    assert max(map(len, records.table(record).splitlines())) <= 80
    assert "predicted" not in record["rows"][network.one_node(64)]


def test_a_burst_is_a_millisecond_of_the_link_but_enough_to_keep_its_rate():
    assert burst_bytes(1e9) == 125_000
    assert burst_bytes(1e8) == 16 * 1024  # a fifth of BasicNet's small bucket
    assert burst_bytes(1e10) == 256 * 1024


def test_plots_are_drawn_from_the_record_alone_and_not_without_it(tmp_path, coarse):
    rows = {
        network.row_name(name, 64): {
            "median": 300.0,
            "low": 290.0,
            "high": 310.0,
            "batch_per_process": 64,
            "nominal_bits_per_sec": nominal,
            "tcp_bits_per_sec": nominal or 2e10,
        }
        for name, nominal in network.BANDWIDTHS.items()
    }
    rows[network.one_node(64)] = {"median": 800.0, "low": 790.0, "high": 810.0, "batch_per_process": 64}
    record = {"rows": rows, "rounds": 2, "calibration": {"64": asdict(MODEL)}}
    machine = {"processor": "abacus", "cores": 2, "gpus": [], "torch": "2"}
    network_plot.draw(json.loads(json.dumps([record])), machine, tmp_path)
    for name in ("network.png", "network_prediction.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    for missing in ("calibration", "rows"):
        with pytest.raises(KeyError):
            network_plot.draw([{key: value for key, value in record.items() if key != missing}], machine, tmp_path)
        assert not list(tmp_path.iterdir()), "an old plot can be taken for new"


@pytest.mark.slow
@TWO_NODES
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
@TWO_NODES
def test_a_process_that_has_not_reached_its_node_yet_is_killed_with_it(tmp_path, monkeypatch):
    slow = tmp_path / "ip"
    slow.write_text(f'#!/bin/sh\n[ "$2" = exec ] && sleep 3\nexec {shutil.which("ip")} "$@"\n')
    slow.chmod(0o755)
    with two_nodes() as nodes:
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        sleeper = nodes.start(1, ["sleep", "1000"])
    assert sleeper.wait(1) == -9


@pytest.mark.slow
@TWO_NODES
def test_the_nodes_of_a_killed_process_are_swept_by_the_next_that_makes_some():
    program = "import time; from benchmarks.harness.two_nodes import two_nodes\nwith two_nodes() as nodes:"
    program += "\n  nodes.start(0, ['sleep', '1000']); print(*nodes.names, flush=True); time.sleep(1000)"
    killed = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ladder.ROOT)
    left = set(killed.stdout.readline().split())
    killed.kill()
    killed.wait(10)
    assert left <= _namespaces()
    with two_nodes() as nodes:
        assert not left & _namespaces()
        assert set(nodes.names) <= _namespaces()


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
