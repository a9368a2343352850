"""The model of a step over a network, by hand; the two nodes, their cable and their end; and the plots' input."""

import json
import subprocess
import sys
from dataclasses import asdict

import pytest

from benchmarks.harness.two_nodes import ADDRESSES, two_nodes, why_not
from benchmarks.report import network_plot
from benchmarks.suites import network
from benchmarks.suites.network import Calibration, buckets

# 100 ms of compute, 40 of them left when the large bucket of 4 MB starts; 1 ms a message.
MODEL = Calibration(compute=0.1, window=0.4, latency=0.001, large=4_000_000, small=100_000)
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
    assert MODEL.step(100e6, nodes=1) == MODEL.compute
    assert MODEL.step(100e6, nodes=4) == pytest.approx(0.1 + (1.5 * 0.32 + 0.006 - 0.04) + (1.5 * 0.008 + 0.006))
    efficiencies = [MODEL.efficiency(1e9, nodes) for nodes in (1, 2, 64, 4096)]
    assert efficiencies == sorted(efficiencies, reverse=True) and efficiencies[0] == 1


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
    record = {"rows": rows, "rounds": 2, "calibration": {"64": asdict(MODEL)}}
    machine = {"processor": "abacus", "cores": 2, "gpus": [], "torch": "2"}
    file, folder = tmp_path / "network.json", tmp_path / "plots"
    file.write_text(json.dumps({"machine": machine, "groups": [record]}))
    network_plot.main([str(file), "--out", str(folder)])
    for name in ("network.png", "network_prediction.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    for missing in ("calibration", "rows"):
        with pytest.raises(KeyError):
            network_plot.draw({key: value for key, value in record.items() if key != missing}, machine, folder)
        assert not list(folder.iterdir()), "an old plot can be taken for new"


@pytest.mark.slow
@TWO_NODES
def test_two_nodes_can_throttle_their_cable_and_leave_nothing_behind():
    before = _namespaces()
    with pytest.raises(ZeroDivisionError), two_nodes() as nodes:
        assert _seconds_for_a_megabyte(nodes) < 5
        nodes.limit(2e6)
        assert _seconds_for_a_megabyte(nodes) > 1.5  # 8 Mbit, less a burst of 2 Mbit
        sleeper = nodes.start(1, ["sleep", "1000"])
        raise ZeroDivisionError
    assert sleeper.wait(10) == -9
    assert _namespaces() == before


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
