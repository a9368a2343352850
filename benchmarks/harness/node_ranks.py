"""Ranks on nodes: ranks of `common.processes`, each of which works in a network namespace of its own."""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness.two_nodes import ADDRESSES, INTERFACE
from common.cores import available_cores, device_cores
from common.processes import Ranks

NAMESPACES = Path("/var/run/netns")  # `ip netns add` makes a file for each of them here
CLONE_NEWNET = 0x40000000  # in Linux's sched.h; Python has a name for it, and os.setns, from 3.12 on
# A node has one rank. The address is that of rank 0's node, on which nothing else uses a port.
VARIABLES = {"MASTER_ADDR": ADDRESSES[0], "GLOO_SOCKET_IFNAME": INTERFACE, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


@contextmanager
def run_on_nodes(names: tuple[str, ...]) -> Iterator[Callable[..., list]]:
    """`common.processes.Ranks.run`, with a rank on the node of each of these namespaces, in their order."""
    pool = Ranks(len(names), on_cpu=True)  # of their own, because a process stays on its node after a job
    try:
        yield partial(pool.run, move_and_call, names, environment=VARIABLES)
    finally:
        pool.stop()


def move_and_call(names: tuple[str, ...], function: Callable, *args: Any) -> Any:
    """The job of a rank: it moves to its node, which is named in `names`, and returns `function(*args)`."""
    rank = int(os.environ["RANK"])
    # It moves in each job, because after a failure processes are new.
    # Linux moves the calling thread. The threads that it starts later, such as those of gloo, follow it.
    with (NAMESPACES / names[rank]).open() as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns into {names[rank]}")
    # Each node has a core of its own: the first of its half, so that the nodes share no physical core if there are two.
    # After the first job that core is the only one that the rank may use; `two_nodes` needs two.
    cores = available_cores()
    if cores > 1:
        os.sched_setaffinity(0, device_cores(rank, cores // 2)[:1])
    # At each connection torch warns on stderr that an address of a node has no name. Errors are sent as RankFailed.
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    return function(*args)
