"""DDP's throughput on two nodes against the bandwidth of the link between them.

Two nodes (see `benchmarks.harness.two_nodes`), a process on each, one core and one thread each. Level 02 trains at
every bandwidth in turn, and on one of the nodes alone.
"""

import os
from functools import partial

from benchmarks.harness import level_runs, records
from benchmarks.harness.node_ranks import NodeRanks, node_ranks
from benchmarks.harness.options import MeasureOptions
from benchmarks.harness.paired import WARM_UP_STEPS, Samples, take_turns
from benchmarks.harness.rows import RAW_DDP
from benchmarks.suites.throughput import Configuration, Steps

# Bits per second; None is the cable as it is, which is the machine's memory.
BANDWIDTHS = {"unlimited": None, "10 Gbit/s": 1e10, "1 Gbit/s": 1e9, "100 Mbit/s": 1e8}
BATCHES_PER_PROCESS = (64, 256)
QUICK_BATCH = 64
STEPS = Steps(WARM_UP_STEPS, 4)
TIMEOUT_SECONDS = 300
TITLE = "Throughput of DDP on two nodes against the bandwidth between them"


def row_name(bandwidth: str, batch: int) -> str:
    """The name of the row of two nodes at one of BANDWIDTHS."""
    return f"{bandwidth}, batch {batch} per process"


def one_node(batch: int) -> str:
    """The name of the row of one process, while the other node is idle."""
    return f"one node, batch {batch}"


def measure(options: MeasureOptions) -> dict:
    """One group, of all rows; with --quick of those of QUICK_BATCH."""
    batches = (QUICK_BATCH,) if options.quick else BATCHES_PER_PROCESS
    contestants = {}
    with node_ranks() as pair:
        for batch in batches:
            contestants[one_node(batch)] = partial(images_per_second, pair, 1, batch, None)
            for name, bandwidth in BANDWIDTHS.items():
                contestants[row_name(name, batch)] = partial(images_per_second, pair, 2, batch, bandwidth)
        samples = take_turns(contestants, range(options.rounds))
    return {"groups": [record(samples)]}


def images_per_second(pair: NodeRanks, nodes: int, batch: int, bandwidth: float | None) -> float:
    """Images per second of the first nodes by the slowest rank's clock, with so many images for each process."""
    pair.nodes.limit(bandwidth)
    return min(pair.run(train, nodes, batch, timeout=TIMEOUT_SECONDS)[:nodes])


def train(nodes: int, batch_per_process: int) -> float | None:
    """Level 02's images per second over the first nodes, by this rank's clock; None of a node that stays idle."""
    if int(os.environ["RANK"]) >= nodes:
        return None
    level = Configuration(RAW_DDP, nodes, batch_per_process * nodes)
    argv = [*level.argv(STEPS), "--dataset", "synthetic", "--device", "cpu"]
    # Level 02 reads WORLD_SIZE. With 1, rank 0 trains alone while rank 1 is idle. Each call sets it anew.
    os.environ["WORLD_SIZE"] = str(nodes)
    return level_runs.train(RAW_DDP, argv, threads=1)["images_per_sec"]


def record(samples: Samples) -> dict:
    """The group of `benchmarks.harness.records`, with the ratio of two nodes over each link to one node."""
    metadata = {}
    ratios = []
    for batch in BATCHES_PER_PROCESS:
        alone = one_node(batch)
        metadata[alone] = {"nodes": 1, "link": None, "batch_per_process": batch, "global_batch_size": batch}
        for bandwidth in BANDWIDTHS:
            row = row_name(bandwidth, batch)
            metadata[row] = {"nodes": 2, "link": bandwidth, "batch_per_process": batch, "global_batch_size": 2 * batch}
            ratios.append((row, alone))
    return records.group(TITLE, "images/s", samples, metadata, ratios)
