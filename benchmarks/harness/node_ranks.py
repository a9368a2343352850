"""Two ranks, one on each of two nodes, that run one job after another, as those of `common.processes` on one machine.

torchrun starts this module once on each node. A job, and what its function returns, is a line on the module's stdin and
stdout: a pickle in base64. A job names the port at which the ranks meet for it, so that no job finds the keys of an
earlier one.
"""

import base64
import contextlib
import io
import itertools
import os
import pickle
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.harness.options import CannotMeasure
from benchmarks.harness.two_nodes import Nodes, two_nodes, why_not
from common.allocator import keep_large_blocks


class NodeRanks:
    """The two ranks, seen from the process that gives them jobs; `nodes` has the cable between them."""

    def __init__(self, nodes: Nodes, agents: list[subprocess.Popen]) -> None:
        self.nodes = nodes
        self._agents = agents
        self._ports = itertools.count(20_000)

    def run(self, function: Callable, *args: Any, timeout: float) -> list:
        """Call `function(*args)` on both ranks, and return their results.

        Raises:
            RuntimeError: if one of them ends, or is silent for `timeout` seconds. What it says stands on stderr.
        """
        job = _to_line((next(self._ports), function, args))
        with contextlib.suppress(BrokenPipeError):  # a rank has ended, so its result will be missing
            for agent in self._agents:
                agent.stdin.write(job)
                agent.stdin.flush()
        results = []
        for node, agent in enumerate(self._agents):
            ready, _, _ = select.select([agent.stdout], [], [], timeout)
            line = agent.stdout.readline() if ready else ""
            if not line:
                raise RuntimeError(f"{function.__name__}{args}: no answer of node {node} within {timeout} s")
            results.append(_from_line(line))
        return results


@contextlib.contextmanager
def node_ranks() -> Iterator[NodeRanks]:
    """Two nodes with a waiting rank on each. CannotMeasure is raised where there can be no nodes."""
    reason = why_not()
    if reason:
        raise CannotMeasure(f"no two nodes: {reason}")
    with tempfile.TemporaryDirectory(prefix="two-nodes-") as folder, two_nodes() as nodes:
        environment = {"OMP_NUM_THREADS": "1", "TMPDIR": folder, "CUDA_VISIBLE_DEVICES": ""}
        environment["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # it warns that a namespace has no host name
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        module = ["-m", "benchmarks.harness.node_ranks"]
        agents = [nodes.torchrun(node, module, environment=environment, **pipes) for node in (0, 1)]
        try:
            yield NodeRanks(nodes, agents)
        finally:
            for node, agent in enumerate(agents):
                nodes.kill(node)
                agent.communicate()


def _to_line(content: Any) -> str:
    return base64.b64encode(pickle.dumps(content)).decode() + "\n"


def _from_line(line: str) -> Any:
    return pickle.loads(base64.b64decode(line))


def main() -> None:
    """One of the two ranks: run the jobs on stdin, until there are no more."""
    keep_large_blocks()  # as the levels do, but before the first tensor of the first job
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})  # one core a node, as though each had its own
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # rank 0 opens a store at the job's port, not torchrun's agent
    for line in sys.stdin:
        port, function, args = _from_line(line)
        os.environ["MASTER_PORT"] = str(port)
        with contextlib.redirect_stdout(io.StringIO()):
            result = function(*args)
        print(_to_line(result), end="", flush=True)


if __name__ == "__main__":
    main()
