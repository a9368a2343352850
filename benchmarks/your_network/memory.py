"""What would each strategy need on each device, and which batch fits?

A step is run on tensors without memory (see `hollow`), and every storage is charged to its device (`common.memory`).
"""

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from textwrap import fill, shorten
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.harness.fused_attention import FusedAttention
from benchmarks.harness.hollow import hollow
from benchmarks.your_network import spec, strategies, training
from benchmarks.your_network.answers import write_json
from benchmarks.your_network.errors import StepFailed
from benchmarks.your_network.spec import UserNetwork
from benchmarks.your_network.strategies import Strategy
from benchmarks.your_network.training import SMALLEST
from common.errors import fail
from common.memory import CATEGORIES, Ledger, accounting, name_category

PRECISIONS = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
GIB = 2**30
CLOSE = 0.01  # how far a peak may be from a straight line that counts as one with it
GROWTH = 256  # times the largest batch that was run: no line is trusted beyond it
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
        largest: the largest global batch by the GiB of each device, 0 where none fits.
        problem: why there is no `need`, or no largest batch; or "".
    """

    strategy: str
    devices: int
    need: Need | None = None
    largest: dict[int, int] = field(default_factory=dict)
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
    plain: Line | None = None
    for devices in sorted({1, *counts}):  # one device says whether the network can be trained at all
        for strategy in strategies.on(devices):
            if (strategy.name, devices) not in rows:
                setting = Setting(strategy, devices, options.precision, options.checkpointing)
                alike = [count for count in counts if count > 1] if strategy.is_alone else [devices]
                found, line = find(network, setting, alike, options.batch, sizes, plain)
                if line and line.samples > options.batch:  # else activations may not decide yet
                    plain = plain or line
                for row in found:
                    rows[row.strategy, row.devices] = row
            row = rows[strategy.name, devices]
            if devices == 1 and row.need is None:
                raise StepFailed(row.problem)
            if devices in counts:
                print(line_of(row), flush=True)
    found = [rows[strategy.name, devices] for devices in counts for strategy in strategies.on(devices)]
    print_batches(found, sizes)
    print(NOT_COUNTED)
    write_json(options, {"memory": [asdict(row) for row in found]})


class Steps:
    """Steps of one process with any batch."""

    def __init__(self, network: UserNetwork, setting: Setting, mesh: DeviceMesh, ledger: Ledger) -> None:
        strategy = setting.strategy
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
        self._make_state()

    def _make_state(self) -> None:
        """Let the optimizer make its state, as its first step does, without a forward and a backward before it."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        with training.explained(f"the optimizer of {self.network.title} failed"):
            self.optimizer.step()
        self.optimizer.zero_grad()

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
def steps(network: UserNetwork, setting: Setting) -> Iterator[Steps]:
    """Steps of one rank whose group has no other members.

    Raises:
        StepFailed: if the strategy cannot take the network.
    """
    with strategies.lone_rank(setting.rank, setting.devices) as mesh, hollow(), accounting() as ledger:
        yield Steps(network, setting, mesh, ledger)


def need(network: UserNetwork, setting: Setting, samples: int) -> Need:
    """The bytes that a step of so many samples on each device needs.

    Raises:
        StepFailed: see `steps`; or if the network, its batch or its loss does not work.
    """
    with steps(network, setting) as run:
        return run.need(samples)


def find(
    network: UserNetwork,
    setting: Setting,
    counts: Sequence[int],
    batch: int,
    sizes: Sequence[int],
    plain: "Line | None" = None,
) -> "tuple[list[Row], Line | None]":
    """The rows of a strategy on several numbers of devices, all of which one process of `setting` can speak for.

    Args:
        batch: the global one.
        sizes: GiB of a device for which the largest batch is sought.
        plain: the line of rows before these, if one is known; that of these rows is returned.
    """
    strategy = setting.strategy
    if strategy is strategies.ZERO_1:
        setting = replace(setting, rank=fullest_rank(network, setting.devices))
    needs: dict[int, Need] = {}  # by devices
    largest: dict[int, int] = {}
    line = None
    problem = ""
    try:
        with steps(network, setting) as run:
            for devices in counts:
                needs[devices] = run.need(batch // devices)
            peaks = {batch // devices: found.most for devices, found in needs.items()}
            limits = [size * GIB for size in sizes]
            line = follow(lambda samples: run.need(samples).most, peaks, limits, plain)
            largest = {size: largest_batch(peaks, size * GIB) for size in sizes}
    except StepFailed as error:
        problem = str(error)
    rows = []
    for devices in counts:
        batches = {size: samples * devices for size, samples in largest.items()}
        rows.append(Row(strategy.name, devices, needs.get(devices), batches, problem))
    return rows, line


def fullest_rank(network: UserNetwork, devices: int) -> int:
    """The rank that keeps most of the optimizer's state under ZeRO-1.

    It shares out whole parameters, the largest first, each to the rank that has least.
    """
    with hollow():
        sizes = [parameter.numel() for parameter in training.trained(training.build(network))]
    of_ranks = [0] * devices
    for size in sorted(sizes, reverse=True):
        emptiest = of_ranks.index(min(of_ranks))
        of_ranks[emptiest] += size
    return of_ranks.index(max(of_ranks))


class Line(NamedTuple):
    """The peak of a large batch: `samples` on a device, and the bytes by which one more of them raises the peak."""

    samples: int
    slope: float


def follow(peak_of: Callable[[int], int], peaks: dict[int, int], limits: Sequence[int], plain: Line | None) -> Line:
    """Run the batches between which `peaks`, the bytes by samples on a device, is made of straight lines.

    What a step holds at one moment grows with the samples by a straight line. A peak is the largest of all moments, so
    it bends upwards: mostly once, where the activations begin to decide. The strategies differ in what does not depend
    on the batch, so a line that is `plain` saves the run that tells the slope, where that batch is too large here too.
    Where its line does not meet the smallest batch, the peak bends between them, and the bend is run too.

    Args:
        limits: bytes of a device, in ascending order.
    """

    def run(samples: int) -> None:
        if samples not in peaks:
            peaks[samples] = peak_of(samples)

    if min(peaks.values()) > limits[0]:
        run(SMALLEST)
    large = max(peaks)
    if plain:
        large = plain.samples
        run(large)
    while peaks[large] <= limits[-1]:
        wanted = min(large * limits[-1] / peaks[large], GROWTH * large)
        large = 2 ** math.ceil(math.log2(wanted + 1))
        run(large)
    if plain and large == plain.samples:
        slope = plain.slope
    else:
        run(large // 2)
        slope = (peaks[large] - peaks[large // 2]) / (large - large // 2)
    least = min(peaks)
    on_the_line = peaks[large] - slope * (large - least)
    if slope and abs(on_the_line - peaks[least]) > CLOSE * peaks[least]:
        bend = large - (peaks[large] - peaks[least]) / slope
        run(math.ceil(bend) if bend > least else large // 2)
    return Line(large, slope)


def largest_batch(peaks: dict[int, int], limit: int) -> int:
    """The most samples that fit by the straight lines between those that were run, the last of which do not fit.

    Where the peak bends between two of them it lies below the line, so what is found fits. 0: not even SMALLEST do.
    """
    points = sorted(peaks.items())
    if points[0][1] > limit:
        return 0
    fitting = [point for point in points if point[1] <= limit]
    samples, peak = fitting[-1]
    more, higher = points[len(fitting)]
    return int(samples + (limit - peak) / (higher - peak) * (more - samples))


def line_of(row: Row) -> str:
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
    with_batches = [row for row in rows if row.largest]
    if with_batches:
        print("\nThe largest global batch if each device has so much memory (–: none):\n")
        print(f"{'on devices':<20}" + "".join(f"{size:>8} GiB" for size in sizes))
    for row in with_batches:
        batches = [row.largest[size] or "–" for size in sizes]
        print(f"{row.label:<20}" + "".join(f"{batch:>12}" for batch in batches))
    problems = {row.strategy: row.problem for row in rows if row.problem}
    for strategy, problem in problems.items():
        print(fill(f"{strategy}: {problem}", 80))
