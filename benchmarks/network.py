"""DDP's throughput against the bandwidth between two nodes, beside what compute and a ring all-reduce predict.

Two nodes (see `benchmarks.two_nodes`), a process on each, one core and one thread each. Level 02 trains at every
bandwidth in turn. A model of one step is calibrated without the limited runs and compared with them:

    step     = compute + exposed(large bucket) + small bucket
    bucket   = 2 (n − 1) / n · bytes / bandwidth + 2 (n − 1) · latency
    exposed  = max(0, large bucket − what is left of backward when it starts)

    python -m benchmarks.network --json network.json
    python -m benchmarks.network_plot network.json
"""

import argparse
import contextlib
import itertools
import json
import select
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from benchmarks import records
from benchmarks.paired import Samples, measure, summarise
from benchmarks.two_nodes import Nodes, two_nodes, why_not
from common.model import BasicNet

# Bits per second; None is the cable as it is, which is the machine's memory.
BANDWIDTHS = {"unlimited": None, "10 Gbit/s": 1e10, "1 Gbit/s": 1e9, "100 Mbit/s": 1e8}
# Batches per process, steps of a sample, rounds.
FULL, QUICK = ((64, 256), 12, 5), ((64,), 4, 2)
TIMEOUT = 300  # seconds, for any one job


@dataclass(frozen=True)
class Calibration:
    """What the model of a step knows.

    Attributes:
        compute: seconds of a step on the unlimited cable, less the latency of its all-reduces. It thus holds what it
            costs the processor to send and to receive.
        window: the share of `compute` that is left of backward when the large bucket is full.
        latency: seconds for one of a ring's 2 (n − 1) messages.
        large, small: bytes of DDP's two buckets: the linear layers' gradients, and the convolutions', which are last.
    """

    compute: float
    window: float
    latency: float
    large: int
    small: int

    def step(self, bits_per_second: float, nodes: int = 2, overlap: bool = True) -> float:
        """Seconds of one step; without `overlap` as though no byte moved before backward has ended."""
        large, small = (self._all_reduce(size, bits_per_second, nodes) for size in (self.large, self.small))
        hidden = self.window * self.compute if overlap else 0.0
        return self.compute + max(0.0, large - hidden) + small

    def efficiency(self, bits_per_second: float, nodes: int) -> float:
        """Of `nodes` nodes with as large a batch each (weak scaling): their throughput over that many times one's."""
        return self.compute / self.step(bits_per_second, nodes)

    def _all_reduce(self, size: int, bits_per_second: float, nodes: int) -> float:
        messages = 2 * (nodes - 1)
        return messages / nodes * 8 * size / bits_per_second + messages * self.latency


def buckets() -> tuple[int, int]:
    """Bytes of the large and the small bucket, as DDP fills them: from the last layer, the first one up to 1 MiB."""
    sizes: dict[str, int] = defaultdict(int)
    for name, parameter in BasicNet().named_parameters():
        sizes[name[:2]] += parameter.numel() * parameter.element_size()
    return sizes["fc"], sizes["co"]


class Network:
    """The two nodes with their ranks, waiting for jobs, and the TCP rates that have been measured between them."""

    def __init__(self, nodes: Nodes, agents: list[subprocess.Popen], errors: list[Path]) -> None:
        self._nodes, self._agents, self._errors = nodes, agents, errors
        self._ports = itertools.count(20_000)
        self.rates: dict[str, list[float]] = {name: [] for name in BANDWIDTHS}

    def ask(self, job: str, **arguments) -> list:
        """Both ranks' answers to a job of `benchmarks.network_rank`.

        RuntimeError, with what the ranks said on stderr, is raised if one of them ends or is silent for too long.
        """
        line = json.dumps([job, next(self._ports), arguments]) + "\n"
        answers = []
        with contextlib.suppress(BrokenPipeError):
            for agent in self._agents:
                agent.stdin.write(line)
                agent.stdin.flush()
        for agent in self._agents:
            ready, _, _ = select.select([agent.stdout], [], [], TIMEOUT)
            answer = agent.stdout.readline() if ready else ""
            if not answer:
                said = "\n".join(path.read_text() for path in self._errors)
                raise RuntimeError(f"no answer to {line.strip()} within {TIMEOUT} s\n{said}")
            answers.append(json.loads(answer))
        return answers

    def limit(self, name: str) -> None:
        self._nodes.limit(BANDWIDTHS[name])

    def throughput(self, name: str, batch: int, steps: int) -> float:
        """Images per second at this bandwidth, by the slower rank's clock; the link's rate is measured besides."""
        self.limit(name)
        # What takes some 0.3 s, but at least 4 and at most 256 MiB.
        size = min((BANDWIDTHS[name] or 2e10) * 0.3 / 8, 2**28)
        rates = self.ask("transfer", size=int(max(size, 2**22)))
        self.rates[name] += [rate for rate in rates if rate is not None]
        return min(self.ask("throughput", batch_per_process=batch, steps=steps))


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """Two nodes with a waiting rank on each. RuntimeError is raised where there can be no nodes; see `why_not`."""
    with tempfile.TemporaryDirectory(prefix="two-nodes-") as folder, two_nodes() as nodes:
        errors, agents = [Path(folder, f"stderr.{node}") for node in (0, 1)], []
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        for node, path in enumerate(errors):
            with path.open("w") as stderr:
                environment = {"OMP_NUM_THREADS": "1", "TMPDIR": folder}
                arguments = ["-m", "benchmarks.network_rank"]
                agents.append(nodes.torchrun(node, arguments, environment=environment, stderr=stderr, **pipes))
        try:
            yield Network(nodes, agents, errors)
        finally:
            for node, agent in enumerate(agents):
                nodes.kill(node)
                agent.communicate()


def contestants(net: Network, batches: tuple[int, ...], steps: int) -> dict[str, Callable[[], float]]:
    """Of each row its sample: images per second at one bandwidth and batch."""
    return {
        row_name(name, batch): lambda name=name, batch=batch: net.throughput(name, batch, steps)
        for batch in batches
        for name in BANDWIDTHS
    }


def row_name(bandwidth: str, batch: int) -> str:
    return f"{bandwidth}, batch {batch} per process"


def calibrate(net: Network, samples: Samples, batches: tuple[int, ...]) -> dict[int, Calibration]:
    """The model for each batch: from the unlimited runs, a one-number all-reduce, and a step of a process alone."""
    net.limit("unlimited")
    # Two nodes' ring has two messages in a row.
    latency = max(net.ask("latency", repeats=200)) / 2
    large, small = buckets()
    models = {}
    for batch in batches:
        unlimited = 2 * batch / summarise(samples[row_name("unlimited", batch)]).median
        window = summarise(net.ask("window", batch_per_process=batch, repeats=20)).median
        models[batch] = Calibration(unlimited - 4 * latency, window, latency, large, small)
    return models


def record(net: Network, samples: Samples, batches: tuple[int, ...]) -> dict:
    """The group of `benchmarks.records`, with the `calibration` of each batch: all that the plots need."""
    models = calibrate(net, samples, batches)
    facts = {}
    for batch, (name, nominal) in itertools.product(batches, BANDWIDTHS.items()):
        rate = summarise(net.rates[name]).median
        model = models[batch]
        predicted = {
            key: records.rounded(2 * batch / model.step(rate, overlap=overlap))
            for key, overlap in (("predicted", True), ("predicted_without_overlap", False))
        }
        place = {"batch_per_process": batch, "nominal_bits_per_sec": nominal}
        facts[row_name(name, batch)] = place | {"tcp_bits_per_sec": records.rounded(rate)} | predicted
    name = "Throughput of DDP on two nodes against the bandwidth between them"
    result = records.group(name, "images/s", samples, facts)
    result["calibration"] = {str(batch): asdict(model) for batch, model in models.items()}
    result["notes"] = notes(result)
    return result


def notes(result: dict) -> list[str]:
    """What was measured, what was predicted from what, and how well."""
    lines = ["Predicted from the unlimited runs; nothing is fitted to the limited ones:"]
    lines.append(f"  {'':<34}{'TCP Gbit/s':>11}{'measured':>10}{'model':>8}{'no overlap':>12}")
    for name, row in result["rows"].items():
        rate = f"{row['tcp_bits_per_sec'] / 1e9:.3g}"
        lines.append(f"  {name:<34}{rate:>11}{row['median']:>10.0f}{row['predicted']:>8.0f}")
        lines[-1] += f"{row['predicted_without_overlap']:>12.0f}"
    for batch, model in result["calibration"].items():
        compute = f"{1000 * model['compute']:.1f} ms of compute, {model['window']:.0%} of it"
        lines.append(f"Batch {batch}: {compute} after the large bucket is full")
    model, *_ = result["calibration"].values()  # in this they are all alike
    sizes = f"{model['large'] / 1e6:.2f} and {model['small'] / 1e6:.3f} MB"
    return [*lines, f"Buckets of {sizes}, {1e6 * model['latency']:.0f} µs a message"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.network", description=__doc__.splitlines()[0])
    flag = parser.add_argument
    flag("--json", type=Path, metavar="PATH", help="write the record there")
    flag("--rounds", type=int, metavar="N", help=f"how often the rows take turns ({FULL[-1]}; --quick: {QUICK[-1]})")
    flag("--quick", action="store_true", help="one batch, a few short rounds")
    options = parser.parse_args()
    batches, steps, rounds = QUICK if options.quick else FULL
    rounds = rounds if options.rounds is None else options.rounds
    if rounds < 1:
        parser.error("--rounds must be at least 1")
    if reason := why_not():
        sys.exit(f"error: {reason}")
    with network() as net:
        samples = measure(contestants(net, batches, steps), tqdm(range(rounds), leave=False, disable=None))
        result = record(net, samples, batches)
    print(records.table(result))
    if options.json:
        records.write(options.json, "network", [result])


if __name__ == "__main__":
    main()
