"""What would each strategy need on each device, and which batch fits?

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

from benchmarks.harness.fused_attention import FusedAttention
from benchmarks.harness.hollow import DependsOnNumbers, hollow, hollow_if_possible
from benchmarks.your_network import spec, strategies, training
from benchmarks.your_network.answers import conclude
from benchmarks.your_network.errors import StepFailed
from benchmarks.your_network.spec import UserNetwork
from benchmarks.your_network.strategies import Strategy
from common.errors import fail
from common.memory import CATEGORIES, accounting, name_category

PRECISIONS = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
GIB = 2**30
CLOSE = 1.01  # how far a larger batch that might fit may be from the one that is found
TRIES = 20  # batches that are run for one size at most
GROWTH = 256  # times the largest batch that was run: no line is trusted beyond it
SMALLEST = 2  # samples: a batch normalisation needs more than one
HEADS = "on devices          weights  grads optim.  acts.  comm.  temp.    peak   least"
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
    """The bytes of a device at its peak, by category; of DataParallel those of the first device and of another one."""

    devices: tuple[dict[str, int], ...]

    @property
    def peaks(self) -> list[int]:
        return [sum(split.values()) for split in self.devices]

    @property
    def most(self) -> int:
        return max(self.peaks)


@dataclass(frozen=True)
class Row:
    """A strategy on a number of devices.

    Attributes:
        need: of a step with the global batch that was asked for; None where the strategy cannot train this network.
        largest: the largest global batch by the GiB of each device, 0 where none fits. A size is missing where none was
            found.
        slope: bytes by which one more sample on each device raises the peak of a large batch, or None.
        computed: whether the steps were computed, because the network's shapes depend on numbers.
        problem: why there is no `need`, or no batch for some size; or "".
    """

    strategy: str
    devices: int
    need: Need | None = None
    largest: dict[int, int] = field(default_factory=dict)
    slope: float | None = None
    computed: bool = False
    problem: str = ""

    @property
    def label(self) -> str:
        return self.strategy if self.devices == 1 else f"{self.strategy}, {self.devices}"


def answer(options: argparse.Namespace) -> None:
    counts = sorted(set(options.devices))
    for devices in counts:
        if options.batch % devices:
            fail(f"argument --batch: {options.batch} samples cannot be divided among {devices} devices")
    network = spec.load(options.spec, options.input, options.optimizer)
    print(f"{network.title}, global batch {options.batch}, mixed precision: {options.precision}\n")
    print(LEGEND)
    print(HEADS)
    sizes = sorted(set(options.gib))
    rows: dict[tuple[str, int], Row] = {}
    slope = None
    for devices in sorted({1, *counts}):  # one device says whether the network can be trained at all
        for strategy in strategies.on(devices):
            if (strategy.name, devices) not in rows:
                setting = Setting(strategy, devices, options.precision, options.checkpointing)
                alike = [count for count in counts if count > 1] if strategy.is_alone else [devices]
                for row in find(network, setting, alike, options.batch, sizes, slope):
                    rows[row.strategy, row.devices] = row
            row = rows[strategy.name, devices]
            slope = slope or row.slope
            if devices == 1 and row.need is None:
                raise StepFailed(row.problem)
            if devices in counts:
                print(line(row), flush=True)
    found = [rows[strategy.name, devices] for devices in counts for strategy in strategies.on(devices)]
    print_batches(found, sizes)
    print(NOT_COUNTED)
    record = {"batch": options.batch, "memory": [asdict(row) for row in found]}
    conclude(options, facts(found, options.batch, sizes), record)


class Steps:
    """Steps of one process with any batch, in which nothing is computed unless the numbers have to be known."""

    def __init__(self, network: UserNetwork, setting: Setting, mesh, ledger=None) -> None:
        strategy = setting.strategy
        if strategy.cuts_inputs and network.shared:
            reason = "it would cut an input that all samples share; as a buffer of the module it stays whole"
            raise StepFailed(f"{strategy.name} cannot train {network.title}: {reason}")
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
        self.optimizer = strategies.make_optimizer(network, model, strategy)
        self.warm_up = strategy.warm_up

    def step(self, samples: int) -> None:
        """A step of so many samples on each device, after the warm-up if there was none."""
        for _ in range(self.warm_up + 1):
            self._step(samples)
        self.warm_up = 0

    def _step(self, samples: int) -> None:
        if self.setting.strategy.cuts_inputs:
            samples *= self.setting.devices
        batch = training.make_batch(self.network, samples)
        with FusedAttention():
            loss = training.loss_of(self.network, self.model, batch, PRECISIONS[self.setting.precision])
            with training.explained(f"the backward of {self.network.title} failed"):
                loss.backward()  # checkpointed units run their forward again
        with training.explained(f"the optimizer of {self.network.title} failed"):
            self.optimizer.step()
        self.optimizer.zero_grad()

    def need(self, samples: int) -> Need:
        """Of a step with so many samples on each device. Raises what `training` raises."""
        self.ledger.reset_peaks()
        self.step(samples)
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


def need(network: UserNetwork, setting: Setting, samples: int, computes: bool = False) -> Need:
    """The bytes that a step of so many samples on each device needs.

    Raises:
        DependsOnNumbers, StepFailed: see `steps`; or if the network, its batch or its loss does not work.
    """
    with steps(network, setting, computes) as run:
        return run.need(samples)


def find(
    network: UserNetwork,
    setting: Setting,
    counts: Sequence[int],
    batch: int,
    sizes: Sequence[int] = (),
    slope: float | None = None,
) -> list[Row]:
    """The rows of a strategy on several numbers of devices, all of which one process of `setting` can speak for.

    Args:
        batch: the global one.
        sizes: GiB of a device for which the largest batch is sought.
        slope: of another strategy. On large batches they differ in what does not depend on the batch.
    """
    strategy = setting.strategy
    shares = [batch // devices for devices in counts]
    if strategy is strategies.ZERO_1:
        setting = replace(setting, rank=fullest_rank(network, setting.devices))
    needs: dict[int, Need] = {}
    largest: dict[int, int] = {}
    computed = False
    problem = ""
    try:
        try:
            with steps(network, setting) as run:
                for samples in shares:
                    needs[samples] = run.need(samples)
                # DataParallel's first device gathers the outputs of all.
                curve = Curve(run, needs, None if strategy.cuts_inputs else slope)
                for size in reversed(sizes):
                    try:
                        largest[size] = curve.largest(size * GIB)
                    except StepFailed as error:
                        problem = f"? for {size} GiB: {error}"
                slope = curve.last_slope()
        except DependsOnNumbers:  # a search must not compute
            computed = True
            largest.clear()
            for samples in shares:
                needs[samples] = need(network, setting, samples, computes=True)
    except StepFailed as error:
        problem = str(error)
    rows = []
    for devices, samples in zip(counts, shares, strict=True):
        batches = {size: each * devices for size, each in largest.items()}
        rows.append(Row(strategy.name, devices, needs.get(samples), batches, slope, computed, problem))
    return rows


def fullest_rank(network: UserNetwork, devices: int) -> int:
    """The rank that keeps most of the optimizer's state under ZeRO-1.

    It shares out whole parameters, the largest first, each to the rank that has least.
    """
    parameters = hollow_if_possible(lambda: training.trained(training.build(network)))
    sizes = [parameter.numel() for parameter in parameters]
    of_ranks = [0] * devices
    for size in sorted(sizes, reverse=True):
        emptiest = of_ranks.index(min(of_ranks))
        of_ranks[emptiest] += size
    return of_ranks.index(max(of_ranks))


class Curve:
    """The peaks with some numbers of samples, from which those with others follow.

    What a step holds at one moment grows with the samples by a straight line, or faster. A peak is the largest of all
    moments, so it is a convex function: between two numbers that were run it lies below the line through them, and
    above every line through two others that is drawn on. Where the two lines promise the same number, that one is not
    run. So a network whose activations decide needs two runs, and a third where no slope is known.

    Attributes:
        peaks: bytes by the samples on each device.
        slope: what is known from another strategy, in bytes for a sample.
    """

    def __init__(self, run: Steps, needs: dict[int, Need], slope: float | None) -> None:
        self.run = run
        self.peaks = {samples: need.most for samples, need in needs.items()}
        self.slope = slope

    def largest(self, limit: int) -> int:
        """The most samples with a peak of at most `limit` bytes; 0 where not even SMALLEST fit.

        Raises:
            StepFailed: if a step that would decide fails.
        """
        for _ in range(TRIES):
            fitting = [samples for samples, peak in self.peaks.items() if peak <= limit]
            too_large = [samples for samples, peak in self.peaks.items() if peak > limit]
            if not fitting:
                if min(too_large) <= SMALLEST:
                    return 0
                samples = SMALLEST
            elif not too_large:
                samples = self._beyond(max(fitting), limit)
            else:
                least, most = self._between(max(fitting), min(too_large), limit)
                if most <= CLOSE * least or most < least + 1:
                    return least
                # The half of a power of two is one that others run too.
                samples = min(too_large) // 2
                if samples <= 2 * max(fitting):
                    samples = max(max(fitting) + 1, int(least + most) // 2)
            self.peaks[samples] = self.run.need(samples).most
        return max(fitting, default=0)

    def _beyond(self, fitting: int, limit: int) -> int:
        """A number that should be too large. A power of two, so that others run it too: what is alike is known then."""
        slope = self.last_slope() or self.slope or self.peaks[fitting] / fitting
        samples = fitting + (limit - self.peaks[fitting]) / slope
        samples = min(samples, GROWTH * fitting)
        return max(2 * fitting, 2 ** math.ceil(math.log2(samples)))

    def _between(self, fitting: int, too_large: int, limit: int) -> tuple[int, float]:
        """The least and the most that the largest number can be between two that were run."""
        least = fitting + int((limit - self.peaks[fitting]) / self._slope(fitting, too_large))
        before = [samples for samples in self.peaks if samples < fitting]
        beyond = [samples for samples in self.peaks if samples > too_large]
        bounds: list[float] = [too_large - 1]
        slope = self._slope(too_large, min(beyond)) if beyond else self.slope
        if slope:
            bounds.append(too_large - (self.peaks[too_large] - limit) / slope)
        if before and self._slope(max(before), fitting) > 0:
            bounds.append(fitting + (limit - self.peaks[fitting]) / self._slope(max(before), fitting))
        # What another strategy has told may not hold for this one: no bound lies below what is known to fit.
        return least, min(bound for bound in bounds if bound * CLOSE >= least)

    def _slope(self, one: int, other: int) -> float:
        return (self.peaks[other] - self.peaks[one]) / (other - one)

    def last_slope(self) -> float | None:
        """Bytes for a sample, by the two largest numbers that were run."""
        if len(self.peaks) < 2:
            return None
        *_, one, other = sorted(self.peaks)
        return self._slope(one, other)


def line(row: Row) -> str:
    """The row in 82 columns: MiB of the fullest device by category, and of the emptiest."""
    if row.need is None:
        return f"{row.label:<20}" + shorten(f"cannot: {row.problem}", 60, placeholder=" …")
    fullest = max(row.need.devices, key=lambda split: sum(split.values()))
    cells = "".join(f"{fullest[category] / 2**20:>7.0f}" for category in CATEGORIES)
    return f"{row.label:<20}{cells}{row.need.most / 2**20:>8.0f}{min(row.need.peaks) / 2**20:>8.0f}"


def print_batches(rows: Sequence[Row], sizes: Sequence[int]) -> None:
    """Print the largest batches, and what has failed."""
    if any(row.strategy == strategies.ZERO_1.name for row in rows):
        print("ZeRO-1 shares out whole parameters: the state of a large one is on one device.")
    if any(row.computed for row in rows):
        print("This network's shapes depend on numbers, so steps were computed, and no batch is sought.")
    with_batches = [row for row in rows if row.largest]
    if with_batches:
        print("\nThe largest global batch if each device has so much memory (–: none):\n")
        print(f"{'on devices':<20}" + "".join(f"{size:>8} GiB" for size in sizes))
    for row in with_batches:
        batches = [row.largest.get(size, "?") or "–" for size in sizes]
        print(f"{row.label:<20}" + "".join(f"{batch:>12}" for batch in batches))
    problems = {row.strategy: row.problem for row in rows if row.problem}
    for strategy, problem in problems.items():
        print(fill(f"{strategy}: {problem}", 80))


def facts(rows: Sequence[Row], batch: int, sizes: Sequence[int]) -> list[str]:
    """The smallest device that holds the batch, what sharding saves, and what DDP's buckets cost."""
    devices = max(row.devices for row in rows)
    can = {row.strategy: row for row in rows if row.need and row.devices in (1, devices)}
    holds = []
    for strategy in (strategies.ONE_DEVICE, strategies.DDP):
        if strategy.name in can:
            row = can[strategy.name]
            size = next((f"{size} GiB" for size in sizes if row.need.most <= size * GIB), f"over {sizes[-1]} GiB")
            holds.append(f"{size} with {row.label}")
    lines = [f"Batch {batch} needs a device of: {'; '.join(holds) or 'nothing that can train it'}."]
    if can:
        least = min(can.values(), key=lambda row: row.need.most)
        lines.append(f"Least memory: {least.label}, {least.need.most / 2**20:,.0f} MiB on the fullest device.")
    if strategies.DDP.name in can and strategies.BUCKET_VIEWS.name in can:
        ddp = can[strategies.DDP.name].need
        saved = ddp.most - can[strategies.BUCKET_VIEWS.name].need.most
        buckets = ddp.devices[0]["communication"] / 2**20
        lines.append(f"DDP's buckets: {buckets:.0f} MiB; gradient_as_bucket_view=True saves {saved / 2**20:.0f} MiB.")
    return lines
