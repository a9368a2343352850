"""Generated parts of the READMEs that teach: when two nodes pay, what memory holds, and the last samples."""

import json
from pathlib import Path

from torch.utils.data import BatchSampler, DistributedSampler, SequentialSampler

from benchmarks.suites.memory import BUCKET_VIEWS, DDP, FOREACH, FSDP
from benchmarks.suites.network import BANDWIDTHS, one_node, row_name
from common.accelerator.sampler import BatchSamplerShard, DistributedEvalSampler
from common.ladder import scripts

RESULTS = Path("benchmarks/results/amd-epyc-2-cores")  # in the repository
MIB = 2**20
WORLD_SIZES = (2, 4, 8)
BATCHES = (64, 256)  # of each process, in the recorded runs on two nodes
TAIL_SAMPLES = 10_000
TAIL_RANKS = 7
TAIL_BATCH = 70


def break_even() -> str:
    """Two nodes against one in the same rounds: how many times as fast they are, by link and by batch of each process.

    A dash stands where one node was not measured.
    """
    heading = " | ".join(f"batch {batch} each" for batch in BATCHES)
    rows = [f"| link | {heading} |", "|---|--:|--:|"]
    for name in BANDWIDTHS:
        speedups = [_against_one_node(name, batch) for batch in BATCHES]
        rows.append(f"| {name} | {' | '.join(speedups)} |")
    return "\n".join(rows)


def _against_one_node(link: str, batch: int) -> str:
    """The speed of two nodes over this link, as a multiple of one's, with the interval of the median."""
    pair = speed_up_of_two_nodes(link, batch)
    if pair is None:
        return "–"
    low, high = pair["interval"]
    return f"{pair['median']:.2f} ({low:.2f}–{high:.2f})"


def speed_up_of_two_nodes(link: str, batch: int) -> dict | None:
    """The recorded pair of two nodes over this link and one of them; None where one node was not measured."""
    compared = (row_name(link, batch), one_node(batch))
    for pair in _network_group()["pairs"]:
        if (pair["of"], pair["to"]) == compared:
            return pair
    return None


def memory_split() -> str:
    """A table of BasicNet's memory on two devices at the peak of each, in MiB by category."""
    columns = {}
    for wrapper, devices in (("DataParallel", (0, 1)), ("DDP", (0,))):
        row = _memory_row("basic_net", wrapper, 2)
        for device in devices:
            name = "DDP, each" if wrapper == "DDP" else f"DataParallel, device {device}"
            columns[name] = row["peaks"][device]
    names = list(columns)
    rows = [f"| MiB | {' | '.join(names)} |", "|---|" + "--:|" * len(names)]
    for category in columns[names[0]]:
        cells = [f"{columns[name][category] / MIB:.1f}" for name in names]
        rows.append(f"| {category} | {' | '.join(cells)} |")
    sums = [f"{sum(columns[name].values()) / MIB:.1f}" for name in names]
    rows.append(f"| sum | {' | '.join(sums)} |")
    return "\n".join(rows)


def smaller() -> str:
    """The fullest device's accounted peak under DDP and under what lowers it, in MiB, by network and devices."""
    columns = {DDP: "DDP", FOREACH: "foreach AdamW", BUCKET_VIEWS: "gradients in the buckets", FSDP: "FSDP2"}
    rows = [f"| network | devices | {' | '.join(columns.values())} |", "|---|--:|" + "--:|" * len(columns)]
    for network, title in {"basic_net": "BasicNet", "resnet18": "ResNet-18"}.items():
        for devices in WORLD_SIZES:
            cells = []
            for wrapper in columns:
                fullest = max(sum(split.values()) for split in _memory_row(network, wrapper, devices)["peaks"])
                cells.append(f"{fullest / MIB:.1f}")
            rows.append(f"| {title} | {devices} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _recorded(name: str) -> dict:
    return json.loads((scripts.ROOT / RESULTS / f"{name}.json").read_text())


def _network_group() -> dict:
    (group,) = _recorded("network")["groups"]
    return group


def _memory_row(network: str, wrapper: str, devices: int) -> dict:
    """The record of a network's memory under a wrapper on so many devices."""
    for row in _recorded("results")["memory"]:
        if (row["network"], row["wrapper"], row["devices"]) == (network, wrapper, devices):
            return row
    raise LookupError(f"no memory of {network} under {wrapper} on {devices} devices is recorded")


def tails() -> str:
    """A table of what becomes of the last of 10,000 samples on seven ranks with a global batch of 70."""
    steps = TAIL_SAMPLES // TAIL_BATCH
    trained = f"{steps * TAIL_BATCH:,}"
    exact = f"{_of_all_ranks(DistributedEvalSampler):,}"
    padded = f"{_of_all_ranks(DistributedSampler):,}"
    every = f"{TAIL_SAMPLES:,}"
    rows = [
        "| level | trained on | evaluated | counted |",
        "|---|--:|--:|--:|",
        f"| 00, 01: one process | {trained} | {every} | {every} |",
        f"| 02: `DistributedEvalSampler` | {trained} | {exact} | {exact} |",
        f"| 02 with a `DistributedSampler` | – | {padded} | {padded} |",
        f"| 03: `gather_for_metrics` | {trained} | {_computed(TAIL_BATCH, split=True):,} | {every} |",
        f"| 04: the Trainer | {trained} | {_computed(TAIL_BATCH // TAIL_RANKS, split=False):,} | {every} |",
    ]
    return "\n".join(rows)


def _of_all_ranks(sampler: type[DistributedEvalSampler] | type[DistributedSampler]) -> int:
    """The number of samples that a sampler gives to seven ranks in all."""
    shards = [sampler(range(TAIL_SAMPLES), TAIL_RANKS, rank) for rank in range(TAIL_RANKS)]
    return sum(len(shard) for shard in shards)


def _computed(batch_size: int, split: bool) -> int:
    """The number of samples that seven ranks together compute in an evaluation by the core's loaders."""
    computed = 0
    for rank in range(TAIL_RANKS):
        batches = BatchSampler(SequentialSampler(range(TAIL_SAMPLES)), batch_size, drop_last=False)
        computed += sum(len(batch) for batch in BatchSamplerShard(batches, TAIL_RANKS, rank, split_batches=split))
    return computed
