"""DDP's throughput on two nodes against the bandwidth of the link between them.

Two nodes (see `benchmarks.harness.two_nodes`), a process on each, one core and one thread each. Level 02 trains at
every bandwidth in turn, and on one of the nodes alone.
"""

import contextlib
import itertools
import json
import select
import subprocess
import tempfile
from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.harness import records
from benchmarks.harness.options import CannotMeasure, MeasureOptions
from benchmarks.harness.paired import Samples, take_turns
from benchmarks.harness.two_nodes import Nodes, two_nodes, why_not

# Bits per second; None is the cable as it is, which is the machine's memory.
BANDWIDTHS = {"unlimited": None, "10 Gbit/s": 1e10, "1 Gbit/s": 1e9, "100 Mbit/s": 1e8}
BATCHES = (64, 256)  # per process
QUICK_BATCH = 64  # the one that --quick measures
STEPS = 4  # of a sample
TIMEOUT = 300  # seconds, for any one job
TITLE = "Throughput of DDP on two nodes against the bandwidth between them"


class WaitingRanks:
    """The two nodes with their ranks, waiting for jobs."""

    def __init__(self, nodes: Nodes, agents: list[subprocess.Popen]) -> None:
        self._nodes = nodes
        self._agents = agents
        self._ports = itertools.count(20_000)

    def ask(self, job: str, **arguments) -> list:
        """Both ranks' answers to a job of `benchmarks.suites.network_rank`.

        Raises:
            RuntimeError: if one of them ends, or is silent for TIMEOUT seconds. What it says stands on stderr.
        """
        line = json.dumps([job, next(self._ports), arguments])
        with contextlib.suppress(BrokenPipeError):
            for agent in self._agents:
                agent.stdin.write(line + "\n")
                agent.stdin.flush()
        return [self._answer(agent, line) for agent in self._agents]

    def _answer(self, agent: subprocess.Popen, line: str) -> Any:
        ready, _, _ = select.select([agent.stdout], [], [], TIMEOUT)
        answer = agent.stdout.readline() if ready else ""
        if not answer:
            raise RuntimeError(f"no answer to {line} within {TIMEOUT} s")
        return json.loads(answer)

    def limit(self, name: str) -> None:
        self._nodes.limit(BANDWIDTHS[name])

    def throughput(self, batch: int, name: str | None = None) -> float:
        """Images per second by the slower rank's clock: of both nodes at this bandwidth; of one node if it is None."""
        nodes = 1
        if name is not None:
            self.limit(name)
            nodes = 2
        speeds = self.ask("throughput", nodes=nodes, batch_per_process=batch, steps=STEPS)
        return min(speeds[:nodes])


@contextlib.contextmanager
def waiting_ranks() -> Iterator[WaitingRanks]:
    """Two nodes with a waiting rank on each. CannotMeasure is raised where there can be no nodes."""
    reason = why_not()
    if reason:
        raise CannotMeasure(f"no two nodes: {reason}")
    with tempfile.TemporaryDirectory(prefix="two-nodes-") as folder, two_nodes() as nodes:
        environment = {"OMP_NUM_THREADS": "1", "TMPDIR": folder, "CUDA_VISIBLE_DEVICES": ""}
        environment["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # it warns that a namespace has no host name
        arguments = ["-m", "benchmarks.suites.network_rank"]
        agents = []
        for node in (0, 1):
            agent = nodes.torchrun(
                node, arguments, environment=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            agents.append(agent)
        try:
            yield WaitingRanks(nodes, agents)
        finally:
            for node, agent in enumerate(agents):
                nodes.kill(node)
                agent.communicate()


def row_name(bandwidth: str, batch: int) -> str:
    """The name of the row of two nodes at one of BANDWIDTHS."""
    return f"{bandwidth}, batch {batch} per process"


def one_node(batch: int) -> str:
    """The name of the row of one process, while the other node is idle."""
    return f"one node, batch {batch}"


def measure(options: MeasureOptions) -> dict:
    """One group, of all rows; with --quick of those of QUICK_BATCH."""
    with waiting_ranks() as pair:
        contestants = {}
        batches = (QUICK_BATCH,) if options.quick else BATCHES
        for batch in batches:
            contestants[one_node(batch)] = partial(pair.throughput, batch)
            for name in BANDWIDTHS:
                contestants[row_name(name, batch)] = partial(pair.throughput, batch, name)
        samples = take_turns(contestants, range(options.rounds))
    return {"groups": [record(samples)]}


def record(samples: Samples) -> dict:
    """The group of `benchmarks.harness.records`, with the ratio of two nodes over each link to one node."""
    metadata = {}
    ratios = []
    for batch in BATCHES:
        alone = one_node(batch)
        metadata[alone] = {"nodes": 1, "batch_per_process": batch, "global_batch_size": batch}
        for name in BANDWIDTHS:
            row = row_name(name, batch)
            metadata[row] = {"nodes": 2, "batch_per_process": batch, "global_batch_size": 2 * batch}
            ratios.append((row, alone))
    return records.group(TITLE, "images/s", samples, metadata, ratios)
