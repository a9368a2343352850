"""Question 1: what would each strategy need on each device, and which batch fits?

A step is run on tensors without memory (see `hollow`), and every storage is charged to its device (`common.memory`).
"""

import argparse
import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from textwrap import fill, shorten

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from benchmarks.harness.fused_attention import FusedAttention
from benchmarks.harness.hollow import DependsOnNumbers, hollow, hollow_if_possible
from benchmarks.your_network import strategies, training
from benchmarks.your_network.answers import conclude, load
from benchmarks.your_network.errors import StepFailed
from benchmarks.your_network.spec import UserNetwork
from benchmarks.your_network.strategies import Strategy
from common.errors import fail
from common.memory import CATEGORIES, accounting, name_category

PRECISIONS = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
GIB = 2**30
CLOSE = 1.01  # how far a larger batch that might fit may be from the one that is found
TRIES = 20  # batches that are run for one row at most
GROWTH = 256  # times the largest batch that was run: no line is trusted beyond it
HEADS = ("weights", "grads", "optim.", "acts.", "comm.", "temp.", "peak", "least")
LEGEND = """MiB at the peak of a step on the device that needs most. weights: parameters, the
gathered ones too; optim.: the optimizer's state; acts.: activations, which
forward keeps for backward; comm.: DDP's buckets, DataParallel's copies, messages;
temp.: what an operation needs for a moment; least: the device that needs least.
"""
NOT_COUNTED = """
Not counted: the CUDA context (some 0.5 GiB), workspaces of cuBLAS and cuDNN,
NCCL's buffers, fragmentation."""


@dataclass(frozen=True)
class Setting:
    """A way to train a network.

    Attributes:
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
    """The bytes of each device at its peak, by category.

    Where every device has a process of its own, this is one device: that of the process that was run.
    """

    devices: tuple[dict[str, int], ...]

    @property
    def peaks(self) -> list[int]:
        return [sum(split.values()) for split in self.devices]

    @property
    def most(self) -> int:
        return max(self.peaks)


@dataclass
class Row:
    """A strategy on a number of devices.

    Attributes:
        batch: samples of a step on all devices.
        need: of such a step; None where the strategy cannot train this network.
        computed: whether the steps were computed, because the network's shapes depend on numbers.
        largest: the largest batch by the GiB of each device, 0 where none fits. A size is missing where none was found.
        slope: bytes by which one more sample on each device raises the peak of a large batch, or None.
        problem: why there is no `need`, or no batch for some sizes; or "".
    """

    strategy: str
    devices: int
    batch: int
    need: Need | None = None
    computed: bool = False
    largest: dict[int, int] = field(default_factory=dict)
    slope: float | None = None
    problem: str = ""

    @property
    def label(self) -> str:
        return self.strategy if self.devices == 1 else f"{self.strategy}, {self.devices}"


def answer(options: argparse.Namespace) -> None:
    for devices in options.devices:
        if options.batch % devices:
            fail(f"argument --batch: {options.batch} samples cannot be divided among {devices} devices")
    network = load(options)
    print(f"{network.title}, global batch {options.batch}, mixed precision: {options.precision}\n")
    print(LEGEND)
    print(f"{'on devices':<20}" + "".join(f"{head:>7}" for head in HEADS[:6]) + "".join(f"{h:>8}" for h in HEADS[6:]))
    sizes = sorted(set(options.gib))
    found = []
    for devices in sorted(set(options.devices)):
        for strategy in strategies.on(devices):
            setting = Setting(strategy, devices, options.precision, options.checkpointing)
            slope = next((row.slope for row in found if row.slope), None)
            found.append(find(network, setting, options.batch, sizes, slope))
            print(line(found[-1]), flush=True)
    print_batches(found, sizes)
    print(NOT_COUNTED)
    conclude(options, facts(found, sizes), {"memory": [asdict(each) for each in found]})


class Steps:
    """Steps of one process with any batch, in which nothing is computed unless the numbers have to be known."""

    def __init__(self, network: UserNetwork, setting: Setting, mesh, ledger=None) -> None:
        strategy = setting.strategy
        if strategy.cuts_inputs and network.shared:
            reason = "it would cut an input that all samples share; as a buffer of the module it stays whole"
            raise StepFailed(f"{strategy.name} cannot train {network.title}", reason)
        model = training.build(network)
        if setting.checkpointing:
            model = strategies.checkpointed(model)
        with training.explained(f"{strategy.name} cannot wrap {network.title}"):
            model = strategy.wrap(model, mesh)
        for parameter in model.parameters():
            name_category(parameter, "parameters")
        self.network = network
        self.setting = setting
        self.ledger = ledger
        self.model = model
        self.optimizer = strategies.make_optimizer(network, model, strategy.shard_optimizer)
        self.warm_up = strategy.warm_up

    def step(self, batch: int) -> None:
        """A step of a global batch, after the warm-up if there was none."""
        for _ in range(self.warm_up + 1):
            self._step(self.setting.strategy.batch_of_process(batch, self.setting.devices))
        self.warm_up = 0

    def _step(self, samples: int) -> None:
        batch = training.make_batch(self.network, samples)
        with FusedAttention():
            loss = training.loss_of(self.network, self.model, batch, PRECISIONS[self.setting.precision])
            training.backward(self.network, loss)  # checkpointed units run their forward again
        training.update(self.network, self.optimizer)
        self.optimizer.zero_grad()

    def need(self, batch: int) -> Need:
        """Of a step with this global batch. Raises what `training` raises."""
        self.ledger.reset_peaks()
        self.step(batch)
        return Need(tuple(self.ledger.peaks().values()))


@contextmanager
def steps(network: UserNetwork, setting: Setting, computes: bool = False) -> Iterator[Steps]:
    """Steps of one rank whose group has no other members.

    Args:
        computes: compute them, in real memory.

    Raises:
        DependsOnNumbers: unless they are computed, where the network's shapes depend on numbers.
        StepFailed: if the strategy cannot take the network.
    """
    mode = nullcontext() if computes else hollow()
    with strategies.lone_rank(setting.rank, setting.devices) as mesh, mode, accounting() as ledger:
        yield Steps(network, setting, mesh, ledger)
    if computes:
        gc.collect()  # a wrapper's cycles keep the network alive


def need(network: UserNetwork, setting: Setting, batch: int, computes: bool = False) -> Need:
    """The bytes that a step of a global `batch` needs.

    Raises:
        DependsOnNumbers, StepFailed: see `steps`; or if the network, its batch or its loss does not work.
    """
    with steps(network, setting, computes) as run:
        return run.need(batch)


def need_of_any(network: UserNetwork, setting: Setting, batch: int) -> Need:
    """The same, computed where the network's shapes depend on numbers."""
    try:
        return need(network, setting, batch)
    except DependsOnNumbers:
        return need(network, setting, batch, computes=True)


def find(
    network: UserNetwork, setting: Setting, batch: int, sizes: Sequence[int] = (), slope: float | None = None
) -> Row:
    """The need of a setting with a global batch, and the batches that fit into `sizes` GiB.

    Args:
        slope: see `find_largest`.

    Raises:
        StepFailed: if one device cannot train the network either.
    """
    found = Row(setting.strategy.name, setting.devices, batch)
    try:
        if setting.strategy.shard_optimizer:
            setting = replace(setting, rank=fullest_rank(network, setting.devices))
        try:
            with steps(network, setting) as run:
                found.need = run.need(batch)
                find_largest(run, found, sizes, slope)
        except DependsOnNumbers:  # a search must not compute
            found.computed = True
            found.largest.clear()
            found.need = found.need or need(network, setting, batch, computes=True)
    except StepFailed as error:
        need_of_any(network, replace(setting, strategy=strategies.ONE_DEVICE, devices=1, rank=0), batch)
        found.problem = str(error)
    return found


def fullest_rank(network: UserNetwork, devices: int) -> int:
    """The rank that keeps most of the optimizer's state under ZeRO-1, which shares out whole parameters."""

    def largest_part() -> int:
        parameters = [parameter for parameter in training.build(network).parameters() if parameter.requires_grad]
        parts = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.0)._partition_parameters()
        sizes = [sum(parameter.numel() for group in part for parameter in group["params"]) for part in parts]
        return sizes.index(max(sizes))

    with strategies.lone_rank(0, devices):
        return hollow_if_possible(largest_part)


def find_largest(run: Steps, found: Row, sizes: Sequence[int], slope: float | None) -> None:
    """Find the largest global batch that fits into each of `sizes` GiB, and the row's slope.

    What a step holds at one moment grows with the batch by a straight line, or faster. A peak is the largest of all
    moments, so it is a convex function of the batch: between two batches that were run it lies below the line through
    them, and above every line through two others that is drawn on. Where the two lines promise the same batch, that
    batch is not run. So a network whose activations decide needs two runs a row, and a third where no slope is known.

    Args:
        slope: of another row. On large batches strategies differ in what does not depend on the batch.
    """
    if run.setting.strategy.cuts_inputs:
        slope = None  # the first device gathers the outputs of all
    curve = Curve(run, {found.batch: found.need.most}, found.devices, slope)
    for size in reversed(sizes):
        try:
            found.largest[size] = curve.largest_batch(size * GIB)
        except StepFailed as error:
            found.problem = f"? for {size} GiB: {error}"
    found.slope = slope or curve.slope_of_largest()


class Curve:
    """The peaks of some batches, from which those of others follow.

    Attributes:
        peaks: bytes by global batch; infinite where a step failed.
        failure: of the last step that failed.
        slope: what is known from other rows, in bytes for a sample on each device.
    """

    def __init__(self, run: Steps, peaks: dict[int, float], devices: int, slope: float | None) -> None:
        self.run = run
        self.peaks = peaks
        self.devices = devices
        self.slope = slope
        self.failure: StepFailed | None = None

    def largest_batch(self, limit: int) -> int:
        """The largest batch with a peak of at most `limit` bytes; 0 where not even two samples a device fit.

        Raises:
            StepFailed: if a step with one of the batches that would decide fails.
        """
        smallest = 2 * self.devices  # a batch normalisation needs two samples
        for _ in range(TRIES):
            fitting = max((batch for batch, peak in self.peaks.items() if peak <= limit), default=None)
            too_large = min((batch for batch, peak in self.peaks.items() if peak > limit), default=None)
            if fitting is None:
                if too_large == smallest:
                    return 0
                self._try(smallest)
            elif too_large is None:
                self._try(self._above(fitting, limit))
            else:
                least, most = self._between(fitting, too_large, limit)
                if most <= CLOSE * least or self._in_whole(most) <= least:
                    return least
                if self.peaks[too_large] == math.inf and too_large <= 2 * fitting:  # not worth a search
                    raise StepFailed(f"at least {fitting}: {self.failure}")
                self._try(self._next(fitting, too_large, least, most))
        return fitting or 0

    def _next(self, fitting: int, too_large: int, least: int, most: float) -> int:
        """A batch that tells more of those between two that were run."""
        if self.peaks[too_large] == math.inf:
            return self._in_whole(math.sqrt(fitting * too_large))
        half = self._in_whole(too_large / 2)
        if len(self.peaks) == 2 and half > 2 * fitting:
            return half  # other strategies are asked about it too, and what is alike is known then
        middle = self._in_whole((least + most) / 2)
        return middle if middle > fitting else self._in_whole(most)

    def _try(self, batch: int) -> None:
        try:
            self.peaks[batch] = self.run.need(batch).most
        except StepFailed as error:
            self.peaks[batch] = math.inf
            self.failure = error

    def _in_whole(self, batch: float) -> int:
        return int(batch) // self.devices * self.devices

    def _above(self, fitting: int, limit: int) -> int:
        """A batch that should be too large, the same on each device for all strategies: what is alike is known then."""
        slope = self.slope_of_largest() or self.slope
        if slope:
            batch = fitting / self.devices + (limit - self.peaks[fitting]) / slope
        else:
            batch = fitting / self.devices * limit / self.peaks[fitting]
        each = min(batch, GROWTH * fitting / self.devices)
        return max(2 * fitting, 2 ** math.ceil(math.log2(each)) * self.devices)

    def _between(self, fitting: int, too_large: int, limit: int) -> tuple[int, float]:
        """The least and the most that the largest batch can be between two that were run."""
        share = (limit - self.peaks[fitting]) / (self.peaks[too_large] - self.peaks[fitting])  # 0 of an infinite one
        least = max(fitting, self._in_whole(fitting + share * (too_large - fitting)))
        bounds = [too_large - self.devices]
        beyond = [batch for batch, peak in self.peaks.items() if batch > too_large and peak < math.inf]
        before = [batch for batch in self.peaks if batch < fitting]
        slope = self._slope(too_large, min(beyond)) if beyond else self.slope
        if slope and self.peaks[too_large] < math.inf:
            bounds.append(too_large - (self.peaks[too_large] - limit) / slope * self.devices)
        if before and self._slope(max(before), fitting) > 0:
            slope = self._slope(max(before), fitting)
            bounds.append(fitting + (limit - self.peaks[fitting]) / slope * self.devices)
        # What another row has told may not hold for this one: no bound lies below what is known to fit.
        return least, min(bound for bound in bounds if bound * CLOSE >= least)

    def _slope(self, one: int, other: int) -> float:
        return (self.peaks[other] - self.peaks[one]) / (other - one) * self.devices

    def slope_of_largest(self) -> float | None:
        """Bytes for a sample on each device, by the two largest batches that were run."""
        run = sorted(batch for batch, peak in self.peaks.items() if peak < math.inf)
        return self._slope(*run[-2:]) if len(run) > 1 else None


def line(row: Row) -> str:
    """The row in 82 columns: MiB of the fullest device by category, and of the emptiest."""
    if row.need is None:
        return f"{row.label:<20}" + shorten(f"cannot: {row.problem}", 60, placeholder=" …")
    fullest = max(row.need.devices, key=lambda split: sum(split.values()))
    cells = "".join(f"{fullest[category] / 2**20:>7.0f}" for category in CATEGORIES)
    return f"{row.label:<20}{cells}{row.need.most / 2**20:>8.0f}{min(row.need.peaks) / 2**20:>8.0f}"


def print_batches(found: Sequence[Row], sizes: Sequence[int]) -> None:
    """Print the largest batches, and what has failed."""
    if any(row.strategy == strategies.ZERO_1.name for row in found):
        print("ZeRO-1 shares out whole parameters: the state of a large one is on one device.")
    if any(row.computed for row in found):
        print("This network's shapes depend on numbers, so steps were computed, and no batch is sought.")
    with_batches = [row for row in found if row.largest]
    if with_batches:
        print("\nThe largest global batch if each device has so much memory (–: none):\n")
        print(f"{'on devices':<20}" + "".join(f"{size:>8} GiB" for size in sizes))
    for row in with_batches:
        batches = [row.largest.get(size, "?") or "–" for size in sizes]
        print(f"{row.label:<20}" + "".join(f"{batch:>12}" for batch in batches))
    told: set[str] = set()
    for row in found:
        if row.problem and row.strategy not in told:
            told.add(row.strategy)
            print(fill(f"{row.label}: {row.problem}", 80))


def facts(found: Sequence[Row], sizes: Sequence[int]) -> list[str]:
    """The smallest device that holds the batch, what sharding saves, and what DDP's buckets cost."""
    devices = max(row.devices for row in found)
    can = {row.strategy: row for row in found if row.need and row.devices in (1, devices)}
    holds = []
    for strategy in (strategies.ONE_DEVICE, strategies.DDP):
        if strategy.name in can:
            row = can[strategy.name]
            size = next((f"{size} GiB" for size in sizes if row.need.most <= size * GIB), f"over {sizes[-1]} GiB")
            holds.append(f"{size} with {row.label}")
    lines = [f"Batch {found[0].batch} needs a device of: {'; '.join(holds) or 'nothing that can train it'}."]
    if can:
        least = min(can.values(), key=lambda row: row.need.most)
        lines.append(f"Least memory: {least.label}, {least.need.most / 2**20:,.0f} MiB on the fullest device.")
    if strategies.DDP.name in can and strategies.BUCKET_VIEWS.name in can:
        ddp = can[strategies.DDP.name].need
        saved = ddp.most - can[strategies.BUCKET_VIEWS.name].need.most
        buckets = ddp.devices[0]["communication"] / 2**20
        lines.append(f"DDP's buckets: {buckets:.0f} MiB; gradient_as_bucket_view=True saves {saved / 2**20:.0f} MiB.")
    return lines
