"""DDP's throughput against the bandwidth between two nodes, beside what compute and a ring all-reduce predict.

Two nodes (see `benchmarks.harness.two_nodes`), a process on each, one core and one thread each. Level 02 trains at
every bandwidth in turn, and on one of the nodes alone. A model of one step is calibrated without the limited runs and
compared with them:

    step     = compute + exposed(large bucket) + small bucket
    bucket   = 2 (n − 1) / n · bytes / bandwidth + 2 (n − 1) · latency
    exposed  = max(0, large bucket − what is left of backward when it starts)
"""

import contextlib
import itertools
import json
import select
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import records
from benchmarks.harness.groups import CannotMeasure, Group
from benchmarks.harness.groups import Extent as SessionExtent
from benchmarks.harness.paired import Samples, measure, summarise
from benchmarks.harness.two_nodes import Nodes, two_nodes, why_not
from benchmarks.predict.all_reduce import RING, Cluster, Link, all_reduce
from common.model import BasicNet

# Bits per second; None is the cable as it is, which is the machine's memory.
BANDWIDTHS = {"unlimited": None, "10 Gbit/s": 1e10, "1 Gbit/s": 1e9, "100 Mbit/s": 1e8}
# The model of a step is calibrated there, so what it says of this link is no prediction.
CALIBRATED_AT = "unlimited"


class Extent(NamedTuple):
    """The amount of measuring."""

    batches: tuple[int, ...]  # per process
    steps: int  # of a sample
    rounds: int


FULL = Extent(batches=(64, 256), steps=4, rounds=10)
QUICK = Extent(batches=(64,), steps=4, rounds=2)
TIMEOUT = 300  # seconds, for any one job


@dataclass(frozen=True)
class Calibration:
    """Measured constants of the model of a step.

    Attributes:
        compute: seconds of a step on the unlimited cable, less the latency of its all-reduces. It thus holds what it
            costs the processor to send and to receive.
        window: the share of `compute` that is left of backward when the large bucket is full.
        latency: seconds for one of a ring's 2 (n − 1) messages.
        large, small: bytes of DDP's two buckets: the linear layers' gradients, and the convolutions', which are last.
        alone: seconds of a step of one process while the other node is idle, measured; None in a record of before.
    """

    compute: float
    window: float
    latency: float
    large: int
    small: int
    alone: float | None = None

    def step(self, bits_per_second: float, nodes: int = 2, overlap: bool = True) -> float:
        """Seconds of a step of two or more nodes; without `overlap` as if no byte moved before the end of backward."""
        large = self._all_reduce(self.large, bits_per_second, nodes)
        small = self._all_reduce(self.small, bits_per_second, nodes)
        hidden = self.window * self.compute if overlap else 0.0
        return self.compute + max(0.0, large - hidden) + small

    def efficiency(self, bits_per_second: float, nodes: int) -> float:
        """The share of a step in which `nodes` nodes with as large a batch each compute: the network takes the rest.

        It is not held against `alone`. Two nodes of one machine share its memory, which makes both slower than one of
        them alone; nodes that are machines of their own do not.
        """
        return 1.0 if nodes == 1 else self.compute / self.step(bits_per_second, nodes)

    def _all_reduce(self, size: int, bits_per_second: float, nodes: int) -> float:
        link = Link(self.latency, bits_per_second / 8)
        return all_reduce(size, nodes, Cluster(1, inner=link, network=link, algorithm=RING))


def buckets() -> tuple[int, int]:
    """Bytes of the large and the small bucket, as DDP fills them: from the last layer, the first one up to 1 MiB."""
    sizes: dict[str, int] = defaultdict(int)
    for name, parameter in BasicNet().named_parameters():
        sizes[name[:2]] += parameter.numel() * parameter.element_size()
    return sizes["fc"], sizes["co"]


class Network:
    """The two nodes with their ranks, waiting for jobs, and what has been measured besides.

    Attributes:
        rates: bits per second of the TCP transfers, by bandwidth.
        facts: of each row that has run, how its processes are set and their minor faults per step.
    """

    def __init__(self, nodes: Nodes, agents: list[subprocess.Popen], errors: list[Path]) -> None:
        self._nodes = nodes
        self._agents = agents
        self._errors = errors
        self._ports = itertools.count(20_000)
        self.rates: dict[str, list[float]] = {name: [] for name in BANDWIDTHS}
        self.facts: dict[str, dict] = {}

    def ask(self, job: str, **arguments) -> list:
        """Both ranks' answers to a job of `benchmarks.harness.network_rank`.

        RuntimeError, with what the ranks said on stderr, is raised if one of them ends or is silent for too long.
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
            errors = "\n".join(path.read_text() for path in self._errors)
            raise RuntimeError(f"no answer to {line} within {TIMEOUT} s\n{errors}")
        return json.loads(answer)

    def limit(self, name: str) -> None:
        self._nodes.limit(BANDWIDTHS[name])

    def throughput(self, name: str, batch: int, steps: int) -> float:
        """Images per second at this bandwidth, by the slower rank's clock; the link's rate is measured besides."""
        self.limit(name)
        rates = self.ask("transfer", size=_transfer_size(BANDWIDTHS[name] or 2e10))
        self.rates[name] += [rate for rate in rates if rate is not None]
        slower = min(self.ask("throughput", batch_per_process=batch, steps=steps), key=itemgetter("images_per_sec"))
        self.facts[row_name(name, batch)] = slower
        return slower.pop("images_per_sec")

    def throughput_alone(self, batch: int, steps: int) -> float:
        """Images per second of one process, while the other node waits."""
        result, _ = self.ask("alone", batch_per_process=batch, steps=steps)
        self.facts[one_node(batch)] = result
        return result.pop("images_per_sec")


def _transfer_size(bits_per_second: float) -> int:
    """Bytes that take some 0.3 s, but at least 4 and at most 256 MiB."""
    size = round(bits_per_second * 0.3 / 8)
    return max(2**22, min(size, 2**28))


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """Two nodes with a waiting rank on each. RuntimeError is raised where there can be no nodes; see `why_not`."""
    with tempfile.TemporaryDirectory(prefix="two-nodes-") as folder, two_nodes() as nodes:
        errors = [Path(folder, f"stderr.{node}") for node in (0, 1)]
        agents = []
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        for node, path in enumerate(errors):
            with path.open("w") as stderr:
                environment = {"OMP_NUM_THREADS": "1", "TMPDIR": folder, "CUDA_VISIBLE_DEVICES": ""}
                arguments = ["-m", "benchmarks.harness.network_rank"]
                agents.append(nodes.torchrun(node, arguments, environment=environment, stderr=stderr, **pipes))
        try:
            yield Network(nodes, agents, errors)
        finally:
            for node, agent in enumerate(agents):
                nodes.kill(node)
                agent.communicate()


def contestants(net: Network, batches: tuple[int, ...], steps: int) -> dict[str, Callable[[], float]]:
    """Of each row its sample: images per second of one node, or of both at one bandwidth, with one batch."""
    found = {}
    for batch in batches:
        found[one_node(batch)] = partial(net.throughput_alone, batch, steps)
        for name in BANDWIDTHS:
            found[row_name(name, batch)] = partial(net.throughput, name, batch, steps)
    return found


def row_name(bandwidth: str, batch: int) -> str:
    """Of two nodes at one of BANDWIDTHS."""
    return f"{bandwidth}, batch {batch} per process"


def one_node(batch: int) -> str:
    """The name of the row of one process, while the other node is idle."""
    return f"one node, batch {batch}"


def rows_of(batch: int) -> list[str]:
    """The names of all rows with this batch."""
    return [one_node(batch), *(row_name(name, batch) for name in BANDWIDTHS)]


TITLE = "Throughput of DDP on two nodes against the bandwidth between them"


def groups() -> list[Group]:
    """One group; whether there can be two nodes here shows when it is measured."""
    rows = itertools.chain.from_iterable(map(rows_of, FULL.batches))
    return [Group("network", TITLE, tuple(rows), measured)]


def measured(rows: tuple[str, ...], extent: SessionExtent) -> dict:
    """The record of the batches that have a row among `rows`; the model needs two of their rows, so all are run."""
    reason = why_not()
    if reason:
        raise CannotMeasure(f"no two nodes: {reason}")
    own = QUICK if extent.quick else FULL
    batches = []
    for batch in own.batches:
        if not set(rows).isdisjoint(rows_of(batch)):
            batches.append(batch)
    if not batches:
        raise CannotMeasure(f"--quick measures batch {QUICK.batches[0]} per process only")
    with network() as net:
        samples = measure(contestants(net, tuple(batches), own.steps), extent.rounds)
        return record(net, samples, tuple(batches))


def calibrate(net: Network, samples: Samples, batches: tuple[int, ...]) -> dict[int, Calibration]:
    """The model for each batch: from the unlimited runs, a one-number all-reduce, and a step of a process alone."""
    net.limit(CALIBRATED_AT)
    # Two nodes' ring has two messages in a row.
    latency = max(net.ask("latency", repeats=200)) / 2
    large, small = buckets()
    models = {}
    for batch in batches:
        unlimited = 2 * batch / summarise(samples[row_name(CALIBRATED_AT, batch)]).median
        alone = batch / summarise(samples[one_node(batch)]).median
        window = summarise(net.ask("window", batch_per_process=batch, repeats=20)).median
        models[batch] = Calibration(unlimited - 4 * latency, window, latency, large, small, alone)
    return models


def record(net: Network, samples: Samples, batches: tuple[int, ...]) -> dict:
    """The group of `benchmarks.harness.records`, with the `calibration` of each batch: all that the plots need."""
    models = calibrate(net, samples, batches)
    facts = {}
    ratios = []
    for batch in batches:
        alone = one_node(batch)
        known = {"nodes": 1, "batch_per_process": batch, "global_batch_size": batch, "nominal_bits_per_sec": None}
        facts[alone] = known | net.facts.get(alone, {})
        for name in BANDWIDTHS:
            row = row_name(name, batch)
            known = link_facts(name, batch, summarise(net.rates[name]).median, models[batch])
            facts[row] = known | net.facts.get(row, {})
            ratios.append((row, alone))
    result = records.group(TITLE, "images/s", samples, facts, ratios)
    result["calibration"] = {str(batch): asdict(model) for batch, model in models.items()}
    result["notes"] = notes(result)
    return result


def link_facts(name: str, batch: int, bits_per_second: float, model: Calibration) -> dict:
    """Facts of a row of two nodes: its link, of the rate that TCP had, and the model's prediction."""
    predicted = 2 * batch / model.step(bits_per_second)
    without_overlap = 2 * batch / model.step(bits_per_second, overlap=False)
    return {
        "nodes": 2,
        "batch_per_process": batch,
        "global_batch_size": 2 * batch,
        "nominal_bits_per_sec": BANDWIDTHS[name],
        "tcp_bits_per_sec": records.rounded(bits_per_second),
        "predicted": records.rounded(predicted),
        "predicted_without_overlap": records.rounded(without_overlap),
        "calibrated_here": name == CALIBRATED_AT,
    }


def rows_of_links(result: dict) -> dict[str, dict]:
    """The rows of a record that two nodes have run, each over a link."""
    return {name: row for name, row in result["rows"].items() if "tcp_bits_per_sec" in row}


def notes(result: dict) -> list[str]:
    """Notes on the measurement, and on what was predicted from what, and how well."""
    lines = ["Predicted from the unlimited runs (=); nothing is fitted to the limited ones:"]
    lines.append(f"  {'':<34}{'TCP Gbit/s':>11}{'measured':>10}{'model':>8}{'no overlap':>12}")
    for name, row in rows_of_links(result).items():
        rate = f"{row['tcp_bits_per_sec'] / 1e9:.3g}"
        mark = "=" if row["calibrated_here"] else ""
        predicted = f"{mark}{row['predicted']:.0f}"
        predictions = f"{predicted:>8}{row['predicted_without_overlap']:>12.0f}"
        lines.append(f"  {name:<34}{rate:>11}{row['median']:>10.0f}{predictions}")
    for batch, model in result["calibration"].items():
        compute = f"{1000 * model['compute']:.1f} ms of compute, {model['window']:.0%} of it"
        lines.append(f"Batch {batch}: {compute} after the large bucket is full")
    model, *_ = result["calibration"].values()  # in this they are all alike
    sizes = f"{model['large'] / 1e6:.2f} and {model['small'] / 1e6:.3f} MB"
    return [*lines, f"Buckets of {sizes}, {1e6 * model['latency']:.0f} µs a message"]


if __name__ == "__main__":
    raise SystemExit("error: a suite is run by: pytest benchmarks -k test_network")
