"""Ranks on two nodes: two ranks of `common.processes`, each of which has moved into one of two network namespaces."""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness.options import CannotMeasure
from benchmarks.harness.two_nodes import ADDRESSES, INTERFACE, Nodes, two_nodes, why_not
from common.processes import Ranks

NAMESPACES = Path("/var/run/netns")  # `ip netns add` makes a file for each of them here
CLONE_NEWNET = 0x40000000  # in Linux's sched.h; Python has a name for it, and os.setns, from 3.12 on
# A node has one rank. The address is that of rank 0's node, on which nothing else uses a port.
VARIABLES = {
    "MASTER_ADDR": ADDRESSES[0],
    "GLOO_SOCKET_IFNAME": INTERFACE,
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
}


class NodeRanks:
    """The two ranks, seen from the process that gives them jobs; `nodes` has the cable between them."""

    def __init__(self, nodes: Nodes, ranks: Ranks) -> None:
        self.nodes = nodes
        self._ranks = ranks

    def run(self, function: Callable, *args: Any, timeout: float) -> list:
        """The results of `function(*args)` on both ranks, as `common.processes.Ranks.run` returns or raises."""
        if not self._ranks.workers:  # before the first job, and after one that has failed
            self._ranks.run(move_to_node, self.nodes.names)
        return self._ranks.run(function, *args, timeout=timeout, environment=VARIABLES)


@contextmanager
def node_ranks() -> Iterator[NodeRanks]:
    """Two nodes with a rank on each. CannotMeasure is raised where there can be no nodes."""
    reason = why_not()
    if reason:
        raise CannotMeasure(f"no two nodes: {reason}")
    with two_nodes() as nodes:
        ranks = Ranks(2, on_cpu=True)
        try:
            yield NodeRanks(nodes, ranks)
        finally:
            ranks.stop()


def move_to_node(names: tuple[str, str]) -> None:
    """Move this rank into the network namespace of its node, and onto a core, as though each node had its own.

    Linux moves the calling thread. The threads that it starts later, such as those of gloo, follow it.
    """
    rank = int(os.environ["RANK"])
    with (NAMESPACES / names[rank]).open() as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns into {names[rank]}")
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    # At each connection torch warns on stderr that an address of a node has no name. Errors are sent as RankFailed.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
