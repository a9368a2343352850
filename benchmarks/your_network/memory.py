"""Question 1: what would each strategy need on each device, and which batch fits?

A step is run on tensors without memory (see `hollow`), and every storage is charged to its device (`common.memory`).
"""

import argparse
import contextlib
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from tqdm import tqdm

from benchmarks.your_network import flags, strategies, training
from benchmarks.your_network.flags import positive
from benchmarks.your_network.hollow import DependsOnNumbers, hollow
from benchmarks.your_network.spec import UserNetwork
from benchmarks.your_network.strategies import Strategy
from common.errors import fail
from common.memory import CATEGORIES, accounting, name_category

STEPS = 3  # the optimizer's state is there from the second on, DDP's final buckets only in the third
STEPS_OF_ONE_PROCESS = 2
PRECISIONS = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
GIB = 2**30
SIZES = (8, 16, 24, 40, 80)  # GiB of memory that GPUs have, for the largest batches
LARGE = 256  # samples: enough for activations to decide about the peak
TRIES = 6  # batches that are run, at most, to find the largest one for one size


HELP = "what each strategy needs on each device, and which batch fits"


def add_flags(parser: argparse.ArgumentParser) -> None:
    flags.add_network(parser)
    flag = parser.add_argument
    flag("--batch", type=positive, default=64, metavar="N", help="global batch (64)")
    flag("--devices", type=positive, nargs="+", default=[1, 2, 4, 8], metavar="N", help="how many (1 2 4 8)")
    flag("--precision", choices=PRECISIONS, default="no", help="of mixed precision (no)")
    flag("--checkpointing", action="store_true", help="activation checkpointing of each block")
    flag("--gib", type=positive, nargs="+", default=SIZES, metavar="N", help="memory of a device (8 16 24 40 80)")
    flags.add_json(parser)


def answer(options: argparse.Namespace) -> None:
    for devices in options.devices:
        if options.batch % devices:
            fail(f"argument --batch: {options.batch} samples cannot be divided among {devices} devices")
    network = flags.network(options)
    counts = sorted(set(options.devices))
    total = sum(len(strategies.on(devices)) for devices in counts)
    with tqdm(total=total, leave=False, disable=None) as bar:
        setting = (options.precision, options.checkpointing, sorted(set(options.gib)))
        found = list(rows(network, options.batch, counts, *setting, bar))
    print(f"{network.title}, global batch {options.batch}, mixed precision: {options.precision}\n")
    print(table(found))
    flags.conclude(options, verdict(found), {"memory": found})


@dataclass(frozen=True)
class Setting:
    """A way to train a network.

    Attributes:
        strategy: one of `strategies`.
        devices: how many.
        precision: a key of PRECISIONS.
        checkpointing: whether units keep their inputs only, and compute again in backward.
        rank: whose need is asked for.
    """

    strategy: Strategy
    devices: int
    precision: str = "no"
    checkpointing: bool = False
    rank: int = 0


@dataclass(frozen=True)
class Need:
    """The bytes of each device at its peak.

    Attributes:
        devices: by category. Where every device has a process of its own this is one entry: that of the rank that needs
            most. They are alike but for ZeRO-1, whose optimizer takes parameters as wholes.
        computed: whether the step was computed, because the network's shapes depend on numbers.
    """

    devices: tuple[dict[str, int], ...]
    computed: bool = False

    @property
    def peaks(self) -> list[int]:
        return [sum(split.values()) for split in self.devices]

    @property
    def most(self) -> int:
        return max(self.peaks)


def need(network: UserNetwork, setting: Setting, batch: int, computes: bool = False) -> Need:
    """The bytes that a step of a global `batch` needs.

    Args:
        computes: compute the step, in real memory.

    Raises:
        UserError: if the network, its batch or its loss does not work.
    """
    if not computes:
        try:
            return _run(network, setting, batch, hollow())
        except DependsOnNumbers:
            pass
    return _run(network, setting, batch, contextlib.nullcontext(), computed=True)


def _run(network: UserNetwork, setting: Setting, batch: int, mode, computed: bool = False) -> Need:
    with strategies.lone_rank(setting.rank, setting.devices) as mesh, mode, accounting() as ledger:
        train(network, setting, mesh, setting.strategy.batch_of_process(batch, setting.devices))
    gc.collect()  # a wrapper's cycles keep the network alive
    return Need(tuple(ledger.peaks().values()), computed)


def of_fullest_rank(network: UserNetwork, setting: Setting, batch: int) -> tuple[Setting, Need]:
    """The need of the rank that needs most, and the setting with that rank. Only under ZeRO-1 do ranks differ."""
    if not setting.strategy.shard_optimizer:
        return setting, need(network, setting, batch)
    of_ranks = [replace(setting, rank=rank) for rank in range(setting.devices)]
    needs = [need(network, of_rank, batch) for of_rank in of_ranks]
    return max(zip(of_ranks, needs, strict=True), key=lambda pair: pair[1].most)


def train(network: UserNetwork, setting: Setting, mesh, batch: int) -> None:
    """A few steps of one process, with `batch` samples each."""
    model = training.build(network)
    if setting.checkpointing:
        model = strategies.checkpointed(model)
    with training.explained(f"{setting.strategy.name} cannot wrap {network.title}"):
        model = setting.strategy.wrap(model, mesh)
    for name, parameter in model.named_parameters():
        name_category(parameter, "parameters", name.removeprefix("module."))
    optimizer = strategies.make_optimizer(network, model, setting.strategy.shard_optimizer)
    for _ in range(STEPS_OF_ONE_PROCESS if setting.strategy.one_process else STEPS):
        samples = training.make_batch(network, batch)
        loss = training.loss_of(network, model, samples, PRECISIONS[setting.precision])
        training.backward(network, loss)
        optimizer.step()
        optimizer.zero_grad()


def largest_batch(network: UserNetwork, setting: Setting, limit: int, known: dict[int, int]) -> int:
    """The largest global batch whose peak is at most `limit` bytes; 0 where not even two samples a device fit.

    In large batches activations are what grows, so a peak follows from two others by a straight line. The batch that
    the line promises is run, and only one that has been seen to fit is returned.

    Args:
        known: peaks of two large batches, and of others that were seen; what is seen here is added.
    """
    smallest = 2 * setting.devices  # a batch normalisation needs two samples
    guess = _on_the_line(known, limit, setting.devices)
    for _ in range(TRIES):
        if guess < smallest:
            guess = smallest
        if guess not in known:
            known[guess] = need(network, setting, guess).most
        if known[guess] <= limit:
            return guess
        if guess == smallest:
            return 0
        guess = min(_on_the_line(known, limit, setting.devices), guess - setting.devices)
    return 0


def _on_the_line(known: dict[int, int], limit: int, devices: int) -> int:
    """The batch with a peak of `limit`, by the two known ones that are nearest to it; a multiple of `devices`."""
    nearest_first = sorted(known, key=lambda batch: abs(known[batch] - limit))
    near, other = nearest_first[:2]
    bytes_per_sample = (known[near] - known[other]) / (near - other)
    batch = near + (limit - known[near]) / bytes_per_sample
    return int(batch) // devices * devices


def rows(
    network: UserNetwork,
    batch: int,
    counts: list[int],
    precision: str,
    checkpointing: bool,
    sizes: Sequence[int],
    bar: tqdm,
) -> Iterator[dict]:
    """A row for each strategy and number of devices: the need of each device by category, and the batches that fit.

    Args:
        batch: the global one of the needs.
        counts: numbers of devices.
        precision, checkpointing: see Setting.
        sizes: GiB of each device, for which the largest batch is sought.
        bar: goes on by 1 with each row.
    """
    for devices in counts:
        for strategy in strategies.on(devices):
            setting = Setting(strategy, devices, precision, checkpointing)
            setting, found = of_fullest_rank(network, setting, batch)
            fits = None
            if not found.computed:
                known = {size: need(network, setting, size).most for size in (LARGE, 2 * LARGE)}
                fits = {size: largest_batch(network, setting, size * GIB, known) for size in sizes}
            bar.update()
            yield {
                "strategy": strategy.name,
                "devices": devices,
                "batch": batch,
                "peaks": list(found.devices),
                "computed": found.computed,
                "largest_batch": fits,
            }


def table(found: list[dict]) -> str:
    """The rows in 80 columns: MiB of the fullest device by category, of the emptiest, and the largest batches."""
    heads = ("weights", "grads", "optim.", "acts.", "comm.", "temp.", "peak", "least")
    lines = [
        "MiB at the peak of a step on the device that needs most. weights: parameters, the",
        "gathered ones too; optim.: the optimizer's state; acts.: activations, which",
        "forward keeps for backward; comm.: DDP's buckets, DataParallel's copies, messages;",
        "temp.: what an operation needs for a moment; least: the device that needs least.",
        "",
        f"{'on devices':<20}" + "".join(f"{head:>7}" for head in heads[:-2]) + "".join(f"{h:>8}" for h in heads[-2:]),
    ]
    for row in found:
        fullest = max(row["peaks"], key=_sum)
        cells = [_mib(fullest[category], 7) for category in CATEGORIES]
        cells += [_mib(_sum(fullest), 8), _mib(min(map(_sum, row["peaks"])), 8)]
        lines.append(f"{_label(row):<20}" + "".join(cells))
    if any(row["computed"] for row in found):
        lines += [
            "",
            "This network's shapes depend on numbers, so the steps were computed, and no",
            "largest batch is sought.",
        ]
        return "\n".join(lines)
    lines += ["", "The largest global batch if each device has so much memory (–: none):", ""]
    lines.append(f"{'on devices':<20}" + "".join(f"{size:>8} GiB" for size in found[0]["largest_batch"]))
    for row in found:
        batches = "".join(f"{batch or '–':>12}" for batch in row["largest_batch"].values())
        lines.append(f"{_label(row):<20}" + batches)
    lines += [
        "",
        "Not counted: the CUDA context (some 0.5 GiB), workspaces of cuBLAS and cuDNN,",
        "NCCL's buffers, fragmentation.",
    ]
    return "\n".join(lines)


def _label(row: dict) -> str:
    return row["strategy"] if row["devices"] == 1 else f"{row['strategy']}, {row['devices']}"


def _sum(split: dict[str, int]) -> int:
    return sum(split.values())


def _mib(size: int, width: int) -> str:
    return f"{size / 2**20:>{width}.0f}"


def verdict(found: list[dict]) -> list[str]:
    """The strategy to take, why, and what would change it, a line each; for the most devices that were asked about."""
    devices = max(row["devices"] for row in found)
    of_devices = {row["strategy"]: row for row in found if row["devices"] == devices}
    if devices == 1:
        (row,) = of_devices.values()
        return [f"Level 00: one device needs {_gib(row)} for a batch of {row['batch']}."]
    ddp = of_devices[strategies.DDP.name]
    ddp_fullest = max(ddp["peaks"], key=_sum)
    buckets = ddp_fullest["communication"] / 2**20
    saved = (_peak(ddp) - _peak(of_devices[strategies.BUCKET_VIEWS.name])) / 2**20
    smaller = [of_devices[strategy.name] for strategy in (strategies.ZERO_1, strategies.ZERO_2, strategies.ZERO_3)]
    return [
        f"Take DDP (level 02, 03 or 04): each of {devices} devices needs {_gib(ddp)} for a batch of {ddp['batch']}.",
        f"Why: DataParallel needs {_gib(of_devices[strategies.DATA_PARALLEL.name])} on its first device. "
        f"DDP's buckets cost {buckets:.0f} MiB; gradient_as_bucket_view=True lowers the peak by {saved:.0f} MiB.",
        "What would change it: a model that does not fit. "
        + ", ".join(f"{row['strategy']} needs {_gib(row)}" for row in smaller)
        + ".",
    ]


def _peak(row: dict) -> int:
    return max(map(_sum, row["peaks"]))


def _gib(row: dict) -> str:
    return f"{_peak(row) / GIB:.2f} GiB"
