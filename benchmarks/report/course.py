"""Generated parts of the READMEs that teach: where the collectives are called, what travels, and what memory holds."""

import json
from pathlib import Path

from torch.utils.data import BatchSampler, DistributedSampler, SequentialSampler

from benchmarks.suites.memory import BUCKET_VIEWS, DDP, FOREACH, FSDP
from benchmarks.suites.network import CALIBRATED_AT, Calibration, one_node, row_name, rows_of_links
from common.accelerator.sampler import BatchSamplerShard, DistributedEvalSampler
from common.ladder import scripts
from common.model import BasicNet

RESULTS = Path("benchmarks/results/amd-epyc-2-cores")  # in the repository
MIB = 2**20
WORLD_SIZES = (2, 4, 8)
BATCHES = (64, 256)  # of each process, in the recorded runs on two nodes
TAIL_SAMPLES = 10_000
TAIL_RANKS = 7
TAIL_BATCH = 70
LARGEST = 8  # tensors of a device that a page shows
MICRO_BATCHES = 4  # of the window that `no_sync` is explained with


def ring() -> str:
    """A table of the bytes that each rank sends in one all-reduce of BasicNet's gradients."""
    size = _gradient_bytes()
    rows = ["| ranks | messages | share of the gradients | sent by each rank |", "|--:|--:|--:|--:|"]
    for ranks in WORLD_SIZES:
        share = 2 * (ranks - 1) / ranks
        rows.append(f"| {ranks} | {2 * (ranks - 1)} | {share:.2f} | {share * size / 1e6:.2f} MB |")
    return "\n".join(rows)


def latency() -> str:
    """The cost of the number of messages on the recorded link: all gradients one by one, and in DDP's two buckets."""
    seconds = _calibration(64).latency
    tensors = sum(1 for _ in BasicNet().parameters())
    rows = [f"| ranks | {tensors} all-reduces | 2 all-reduces | saved |", "|--:|--:|--:|--:|"]
    for ranks in WORLD_SIZES:
        messages = 2 * (ranks - 1)
        one_by_one = tensors * messages * seconds * 1e3
        in_buckets = 2 * messages * seconds * 1e3
        saved = one_by_one - in_buckets
        rows.append(f"| {ranks} | {one_by_one:.1f} ms | {in_buckets:.1f} ms | {saved:.1f} ms |")
    return "\n".join(rows)


def overlap() -> str:
    """Two nodes with a batch of 64 each: images per second measured, and predicted with and without overlap."""
    rows = ["| link | measured | predicted | predicted without overlap |", "|---|--:|--:|--:|"]
    for name, row in _links(64).items():
        without = row["predicted_without_overlap"]
        mark = " (calibrated here)" if name == CALIBRATED_AT else ""
        rows.append(f"| {name} | {row['median']:.0f} | {row['predicted']:.0f}{mark} | {without:.0f} |")
    return "\n".join(rows)


def no_sync() -> str:
    """A table of the time that `no_sync` saves in a window of four micro-batches of 64 on two ranks."""
    saved_messages = MICRO_BATCHES - 1
    sent = saved_messages * _gradient_bytes() / 1e6
    calibration = _calibration(64)
    rows = ["| link | not sent by each rank | time not waited |", "|---|--:|--:|"]
    for name, row in _links(64).items():
        if row["nominal_bits_per_sec"]:
            waited = calibration.step(row["tcp_bits_per_sec"]) - calibration.compute
            rows.append(f"| {name} | {sent:.1f} MB | {saved_messages * waited * 1e3:.0f} ms |")
    return "\n".join(rows)


def break_even() -> str:
    """Two nodes against one in the same rounds: how many times as fast they are, by link and by batch of each process.

    A dash stands where one node was not measured.
    """
    heading = " | ".join(f"batch {batch} each" for batch in BATCHES)
    rows = [f"| link | {heading} |", "|---|--:|--:|"]
    for name in _links(BATCHES[0]):
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


def memory_tensors() -> str:
    """The largest tensors of BasicNet's training on device 0 of two, under DataParallel and under DDP, as a table."""
    rows = ["| under | what it is | tensor | shape | MiB |", "|---|---|---|--:|--:|"]
    for wrapper in ("DataParallel", "DDP"):
        row = _memory_row("basic_net", wrapper, 2)
        for tensor in row["tensors"][:LARGEST]:
            shape = "×".join(map(str, tensor["shape"]))
            name = tensor["name"] or tensor["operation"].removeprefix("aten::")
            rows.append(f"| {wrapper} | {tensor['category']} | `{name}` | {shape} | {tensor['size'] / MIB:.1f} |")
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


def zero_split() -> str:
    """A table of ResNet-18's memory on each of eight devices under DDP and FSDP2, in MiB by category."""
    devices = WORLD_SIZES[-1]
    ddp = _memory_row("resnet18", DDP, devices)["peaks"][0]
    fsdp = _memory_row("resnet18", FSDP, devices)["peaks"][0]
    rows = ["| MiB on each of 8 devices | DDP | FSDP2 |", "|---|--:|--:|"]
    for category in ddp:
        rows.append(f"| {category} | {ddp[category] / MIB:.1f} | {fsdp[category] / MIB:.1f} |")
    rows.append(f"| sum | {sum(ddp.values()) / MIB:.1f} | {sum(fsdp.values()) / MIB:.1f} |")
    return "\n".join(rows)


def zero() -> str:
    """Parameters, gradients and AdamW's state per device under DDP, ZeRO and FSDP, by arithmetic, in MiB."""
    parameters = gradients = _gradient_bytes() / MIB
    state = 2 * parameters
    rows = ["| devices | DDP | ZeRO-1 | ZeRO-2 | ZeRO-3, FSDP |", "|--:|--:|--:|--:|--:|"]
    for ranks in WORLD_SIZES:
        cells = [
            parameters + gradients + state,
            parameters + gradients + state / ranks,
            parameters + (gradients + state) / ranks,
            (parameters + gradients + state) / ranks,
        ]
        rows.append(f"| {ranks} | {' | '.join(f'{cell:.1f}' for cell in cells)} |")
    return "\n".join(rows)


def _gradient_bytes() -> int:
    """The bytes of all gradients of BasicNet, which are as many as those of its parameters."""
    return sum(parameter.nbytes for parameter in BasicNet().parameters())


def _recorded(name: str) -> dict:
    return json.loads((scripts.ROOT / RESULTS / f"{name}.json").read_text())


def _network_group() -> dict:
    (group,) = _recorded("network")["groups"]
    return group


def _calibration(batch: int) -> Calibration:
    return Calibration(**_network_group()["calibration"][str(batch)])


def _links(batch: int) -> dict[str, dict]:
    """The recorded rows of DDP on two nodes with a batch of `batch` on each, by the name of the link."""
    links = {}
    for name, row in rows_of_links(_network_group()).items():
        if row["batch_per_process"] == batch:
            link, _, _ = name.partition(",")
            links[link] = row
    return links


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
