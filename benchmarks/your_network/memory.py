"""What would each strategy need on each device, and which batch fits?

A step is run `without_computing`, and every storage is charged to its device (`common.memory`). So a step of a million
samples takes no longer than a step of two.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from textwrap import fill, shorten

import torch
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.harness.replica_memory import track_replicas
from benchmarks.harness.rows import totals
from benchmarks.your_network import spec, strategies, training
from benchmarks.your_network.errors import StepFailed
from benchmarks.your_network.formats import mib
from benchmarks.your_network.spec import UserNetwork
from benchmarks.your_network.strategies import Strategy
from benchmarks.your_network.training import SMALLEST
from benchmarks.your_network.without_computing import without_computing
from common.errors import fail
from common.memory import MemoryTracker, name_category

PRECISIONS = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
WARM_UP_STEPS = 2  # DDP makes its final buckets in the second step
GIB = 2**30
WIDTH = 80  # columns of a terminal
LABEL_WIDTH = 17
# The heads of the table's columns, and what they mean: first the categories of memory.
COLUMNS = {
    "params": "parameters, the gathered ones too",
    "grads": "gradients",
    "optim.": "the optimizer's state",
    "acts.": "activations, which forward keeps for backward",
    "comm.": "DDP's buckets, DataParallel's copies, messages",
    "temp.": "what an operation needs for a moment",
    "peak": "all of these together",
    "least": "the peak of the device that needs least",
    "fits": "largest global batch for devices of {gib} GiB (--gib), to an eighth; –: none",
}
NOT_COUNTED = """
Not counted: the CUDA context (some 0.5 GiB), workspaces of cuBLAS and cuDNN,
NCCL's buffers, fragmentation. ZeRO-1 shares out whole parameters: the row is of
the device that has the largest."""

# The bytes of each device of this process at its peak, by category: of a rank, or of all replicas.
DeviceBytes = list[dict[str, int]]


@dataclass(frozen=True)
class Setting:
    """A way to train a network.

    Attributes:
        precision: a key of PRECISIONS.
        checkpointing: whether units keep their inputs only, and compute again in backward.
    """

    strategy: Strategy
    devices: int
    precision: str = "no"
    checkpointing: bool = False


@dataclass(frozen=True)
class MemoryRow:
    """A strategy on a number of devices.

    Attributes:
        need: of a step with the global batch that was asked for; None where the strategy cannot train this network.
        largest: the largest global batch that fits, 0 where none does; None where no such batch could be run.
        problem: why `need` or `largest` is None; or "".
    """

    strategy: str
    devices: int
    need: DeviceBytes | None
    largest: int | None
    problem: str

    @property
    def label(self) -> str:
        return self.strategy if self.devices == 1 else f"{self.strategy}, {self.devices}"


def answer(options: argparse.Namespace) -> list[MemoryRow]:
    """Print a line for each row as soon as it is known."""
    for devices in options.devices:
        if options.batch % devices:
            fail(f"argument --batch: {options.batch} samples cannot be divided among {devices} devices")
    network = spec.load(options.spec, options.input)
    alone = row_of(network, strategies.ONE_DEVICE_STRATEGY, 1, options)
    if alone.need is None:
        raise StepFailed(alone.problem)  # nothing is printed of a network that cannot be trained at all
    print(f"{network.title}, global batch {options.batch}, mixed precision: {options.precision}\n")
    print_heads(options.gib)
    print(line_of(alone), flush=True)
    rows = [alone]
    for devices in sorted({*options.devices} - {1}):
        for strategy in strategies.ON_SEVERAL:
            row = row_of(network, strategy, devices, options)
            print(line_of(row), flush=True)
            rows.append(row)
    problems = {row.strategy: row.problem for row in rows if row.problem}
    for strategy, problem in problems.items():
        print(fill(f"{strategy}: {problem}", WIDTH))
    print(NOT_COUNTED)
    return rows


def row_of(network: UserNetwork, strategy: Strategy, devices: int, options: argparse.Namespace) -> MemoryRow:
    """What the global batch needs, and the largest one that fits."""
    setting = Setting(strategy, devices, options.precision, options.checkpointing)
    need = None
    largest = None
    problem = ""
    try:
        with lone_training(network, setting) as run:
            need = run.need(options.batch // devices)
            largest = devices * largest_batch(run.peak, options.gib * GIB)
    except StepFailed as error:
        problem = str(error)
    return MemoryRow(strategy.name, devices, need, largest, problem)


def largest_batch(peak_of: Callable[[int], int], limit: int) -> int:
    """The most samples, known to an eighth, of which a step holds no more than `limit` bytes; 0 if not SMALLEST."""
    fitting = 0
    too_many = SMALLEST
    while peak_of(too_many) <= limit:
        fitting = too_many
        too_many *= 2
    while fitting and too_many - fitting > max(fitting // 8, 1):
        middle = (fitting + too_many) // 2
        if peak_of(middle) <= limit:
            fitting = middle
        else:
            too_many = middle
    return fitting


class Training:
    """The training of a network on one process, with a batch of any size.

    The process is a rank of `mesh`, or stands for all of its devices under DataParallel. `tracker` charges what it
    allocates to its devices.

    Raises:
        StepFailed: if the strategy cannot take the network; or if the network, its batch or its loss does not work.
    """

    def __init__(self, network: UserNetwork, setting: Setting, mesh: DeviceMesh, tracker: MemoryTracker) -> None:
        self.network = network
        self.setting = setting
        self.tracker = tracker
        model = training.build(network)
        if setting.checkpointing:
            model = strategies.checkpointed(model)
        with training.step_failure(f"{setting.strategy.name} cannot wrap {network.title}"):
            self.model = setting.strategy.wrap(model, mesh)
        for parameter in self.model.parameters():
            name_category(parameter, "parameters")
        self.optimizer = setting.strategy.make_optimizer(network, self.model)

    def step(self, samples: int) -> None:
        """Take a step of so many samples on each device."""
        if self.setting.strategy.cuts_inputs:
            samples *= self.setting.devices
        batch = training.make_batch(self.network, samples)
        loss = training.loss_of(self.network, self.model, batch, PRECISIONS[self.setting.precision])
        with training.step_failure(f"the backward of {self.network.title} failed"):
            loss.backward()
        with training.step_failure(f"the optimizer of {self.network.title} failed"):
            self.optimizer.step()
        self.optimizer.zero_grad()

    def need(self, samples: int) -> DeviceBytes:
        """What a step of so many samples on each device needs."""
        self.tracker.reset_peaks()
        self.step(samples)
        return list(self.tracker.peaks().values())

    def peak(self, samples: int) -> int:
        """The bytes that it needs on the fullest device."""
        return max(totals(self.need(samples)))


@contextmanager
def lone_training(network: UserNetwork, setting: Setting) -> Iterator[Training]:
    """The training on rank 0, whose group has no other members, after a warm-up. Raises what `Training` raises."""
    with strategies.lone_rank(setting.devices) as mesh, without_computing(), track_replicas() as tracker:
        run = Training(network, setting, mesh, tracker)
        for _ in range(WARM_UP_STEPS):
            run.step(SMALLEST)
        yield run


def print_heads(gib: int) -> None:
    """Print what each column means, and the heads of the columns."""
    print("MiB at the peak of a step on the device that needs most:")
    for head, meaning in COLUMNS.items():
        print(f"{head:<7} {meaning.format(gib=gib)}")
    print(f"\n{in_columns('on devices', list(COLUMNS))}")


def line_of(row: MemoryRow) -> str:
    """The row in WIDTH columns: MiB of the fullest device by category, and of the emptiest, and the batch that fits."""
    if row.need is None:
        reason = shorten(f"cannot: {row.problem}", WIDTH - LABEL_WIDTH - 1, placeholder=" …")
        return f"{row.label:<{LABEL_WIDTH}} {reason}"
    peaks = totals(row.need)
    fullest = row.need[peaks.index(max(peaks))]
    fits = str(row.largest or "–")
    if row.largest is None:
        fits = "cannot"
    sizes = [*fullest.values(), max(peaks), min(peaks)]
    return in_columns(row.label, [*map(mib, sizes), fits])


def in_columns(label: str, cells: list[str]) -> str:
    return f"{label:<{LABEL_WIDTH}}" + "".join(f" {cell:>6}" for cell in cells)
