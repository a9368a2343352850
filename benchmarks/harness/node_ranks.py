"""Ranks on two nodes. Like `common.processes.ranks`, they run one job after another.

torchrun starts this module once on each node. Network namespaces share the file system, so a rank connects to a Unix
socket, over which it receives jobs and sends what their functions return. A job names the port at which the ranks meet
for it, so that no job finds the keys of an earlier one.
"""

import contextlib
import itertools
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Connection
from typing import Any

import torch

from benchmarks.harness.options import CannotMeasure
from benchmarks.harness.two_nodes import Nodes, two_nodes, why_not
from common.allocator import keep_large_blocks
from common.errors import UserError

START_SECONDS = 300


class NodeRanks:
    """The two ranks, seen from the process that gives them jobs; `nodes` has the cable between them."""

    def __init__(self, nodes: Nodes, connections: list[Connection]) -> None:
        self.nodes = nodes
        self._connections = connections
        self._ports = itertools.count(20_000)

    def run(self, function: Callable, *args: Any, timeout: float) -> list:
        """Call `function(*args)` on both ranks, and return their results.

        Raises:
            RuntimeError: if a rank ends, or has no result after `timeout` seconds. Its own error is on stderr.
        """
        job = (next(self._ports), function, args)
        with contextlib.suppress(BrokenPipeError):  # a rank has ended, so its result will be missing
            for connection in self._connections:
                connection.send(job)
        deadline = time.monotonic() + timeout
        results = []
        for node, connection in enumerate(self._connections):
            try:
                if not connection.poll(deadline - time.monotonic()):
                    raise TimeoutError(f"nothing in {timeout} s")
                results.append(connection.recv())
            except (EOFError, OSError) as error:
                raise RuntimeError(f"{function.__name__}{args}: no answer of node {node}") from error
        return results


@contextlib.contextmanager
def node_ranks() -> Iterator[NodeRanks]:
    """Two nodes with a waiting rank on each. CannotMeasure is raised where there can be no nodes."""
    reason = why_not()
    if reason:
        raise CannotMeasure(f"no two nodes: {reason}")
    # Not a Listener of multiprocessing, which would wait for ever for a rank that cannot start.
    with (
        tempfile.TemporaryDirectory(prefix="two-nodes-") as folder,
        socket.socket(socket.AF_UNIX) as server,
        two_nodes() as nodes,
    ):
        address = f"{folder}/jobs"
        server.settimeout(START_SECONDS)
        server.bind(address)
        server.listen()
        environment = {"OMP_NUM_THREADS": "1", "TMPDIR": folder, "CUDA_VISIBLE_DEVICES": ""}
        environment["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # it warns that a namespace has no host name
        module = ["-m", "benchmarks.harness.node_ranks", address]
        for node in (0, 1):
            nodes.torchrun(node, module, environment, stdin=subprocess.DEVNULL)
        connections = {}
        while len(connections) < 2:
            accepted, _ = server.accept()
            connection = Connection(accepted.detach())
            connections[connection.recv()] = connection  # a rank sends its number first
        yield NodeRanks(nodes, [connections[0], connections[1]])


def main() -> None:
    """One of the two ranks: run the jobs that come from the socket which the command line names."""
    keep_large_blocks()  # as the levels do, but before the first tensor of the first job
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})  # one core a node, as though each had its own
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # rank 0 opens a store at the job's port, not torchrun's agent
    with Client(sys.argv[1]) as connection:
        connection.send(rank)
        while True:  # until the node is switched off
            port, function, args = connection.recv()
            os.environ["MASTER_PORT"] = str(port)
            try:
                connection.send(function(*args))
            except UserError as error:
                sys.exit(f"error: {error}")  # a level's own line is lost, as `level_runs.train` shows nothing of it


if __name__ == "__main__":
    main()
