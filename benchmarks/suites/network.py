"""DDP's throughput on two nodes against the bandwidth of the link between them.

A process on each of two nodes (see `benchmarks.harness.two_nodes`) has one core and one thread. Level 02 trains at
every bandwidth in turn, and on one of the nodes alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

from benchmarks.harness import level_runs, records
from benchmarks.harness.configurations import Configuration, Steps
from benchmarks.harness.node_ranks import run_on_nodes
from benchmarks.harness.options import BATCH_SIZES, TIMEOUT_SECONDS, WARM_UP_STEPS, MeasureOptions
from benchmarks.harness.paired import Samples, take_turns
from benchmarks.harness.records import Pair
from benchmarks.harness.rows import RAW_DDP
from benchmarks.harness.two_nodes import BANDWIDTHS, Nodes, two_nodes

STEPS = Steps(WARM_UP_STEPS, 4)


@dataclass(frozen=True)
class LinkRow:
    """Two nodes over one of BANDWIDTHS, or one node while the other is idle."""

    batch: int  # the images of each process
    link: str | None  # the name of the bandwidth; None for one node

    @property
    def nodes(self) -> int:
        return 1 if self.link is None else 2

    @property
    def name(self) -> str:
        if self.link is None:
            return f"one node, batch {self.batch}"
        return f"{self.link}, batch {self.batch} per process"


def measure(options: MeasureOptions) -> dict:
    """One group, of all rows; with --quick of those of the first batch."""
    batches = BATCH_SIZES[:1] if options.quick else BATCH_SIZES
    rows = [LinkRow(batch, link) for batch, link in product(batches, (None, *BANDWIDTHS))]
    with two_nodes() as nodes, run_on_nodes(nodes.names[:1]) as run_on_one, run_on_nodes(nodes.names) as run_on_two:
        contestants = {}
        for row in rows:
            run = run_on_one if row.nodes == 1 else run_on_two
            contestants[row.name] = partial(images_per_second, row, nodes, run)
        samples = take_turns(contestants, range(options.rounds))
    return {"groups": [record(rows, samples)]}


def images_per_second(row: LinkRow, nodes: Nodes, run: Callable[..., list]) -> float:
    """Level 02's images per second on the row's nodes together, by the slowest rank's clock."""
    if row.link is not None:
        nodes.limit(BANDWIDTHS[row.link])
    level = Configuration(RAW_DDP, row.nodes, row.batch * row.nodes)
    argv = [*level.argv(STEPS), "--dataset", "synthetic", "--device", "cpu"]
    results = run(level_runs.run_level, RAW_DDP, argv, timeout=TIMEOUT_SECONDS)
    return min(result["images_per_sec"] for result in results)


def record(rows: list[LinkRow], samples: Samples) -> dict:
    """The group of `benchmarks.harness.records`, with the ratio of two nodes over each link to one node."""
    facts = {}
    pairs = []
    for row in rows:
        facts[row.name] = {
            "nodes": row.nodes,
            "link": row.link,
            "batch_per_process": row.batch,
            "global_batch_size": row.nodes * row.batch,
        }
        if row.link is not None:
            pairs.append(Pair(row.name, LinkRow(row.batch, None).name, "ratio"))
    title = "Throughput of DDP on two nodes against the bandwidth between them"
    return records.group(title, "images/s", samples, facts, pairs)
