"""The memory that each strategy takes on each device, and the largest batch that fits.

A step is run `without_computing`, and every storage is charged to its device (`common.memory`). So a step of a million
samples takes no longer than a step of two.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from textwrap import fill

import torch
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.harness.options import WARM_UP_STEPS
from benchmarks.harness.records import totals
from benchmarks.harness.replica_memory import track_replicas
from benchmarks.harness.rows import DATA_PARALLEL, ONE_DEVICE
from benchmarks.your_network import strategies
from benchmarks.your_network.errors import StepFailed, failing_as
from benchmarks.your_network.formats import mib
from benchmarks.your_network.settings import Setting, check_batch, settings_on
from benchmarks.your_network.spec import load
from benchmarks.your_network.user_network import SMALLEST_BATCH, UserNetwork
from benchmarks.your_network.without_computing import without_computing
from common.memory import MemoryTracker, label

PRECISIONS = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
GIB = 2**30
LARGEST_BATCH = 2**40  # of one device, in the search
TERMINAL_COLUMNS = 80
# The first six stand for common.memory.CATEGORIES, in their order.
HEADS = ("params", "grads", "optim.", "acts.", "comm.", "temp.", "peak", "least", "fits")
LEGEND = """
The first seven columns are MiB of one device at its peak in a step: of rank 0
or, with DataParallel, of the device that needs most.

params  parameters       acts.  activations, which forward keeps for backward
grads   gradients        comm.  DDP's buckets, DataParallel's copies, messages
optim.  optimizer state  temp.  what an operation needs for a moment
peak    the sum of these six
least   MiB of the device that needs least, at its peak; –: only rank 0 is known
fits    the largest global batch for these devices, to an eighth; –: none

Not counted: the CUDA context (some 0.5 GiB), workspaces of cuBLAS and cuDNN,
NCCL's buffers, fragmentation. torch's DataParallel may need more than is shown:
it keeps the gradients of all copies until the last one is there. ZeRO-1 shares
out whole parameters: rank 0 has the largest, but other ranks may need more
memory. ZeRO-2 is FSDP2 without resharding: parameters are whole from forward to
backward only, beside the part that a device keeps."""

# The bytes by category of each device of this process at its peak: of a rank, or of all replicas.
Peaks = list[dict[str, int]]


@dataclass(frozen=True)
class MemoryRow:
    """The memory of a setting.

    Attributes:
        peaks: those of a step with the global batch that was asked for.
        fits: the largest global batch that fits, and 0 if none does; None where the search for it failed.
        failure: why it failed, such as for a batch that the user's file cannot make; else empty.
    """

    setting: Setting
    peaks: Peaks
    fits: int | None
    failure: str = ""


def answer(options: argparse.Namespace) -> list[MemoryRow]:
    """Print a row for each setting as soon as it is known. Returns the rows of those that can train the network.

    Raises StepFailed if one device cannot train it.
    """
    check_batch(options.batch, options.devices)
    network = load(options.spec, options.input)
    network = replace(network, autocast=PRECISIONS[options.precision], checkpointing=options.checkpointing)
    asked_for = f"global batch {options.batch}, mixed precision: {options.precision}, devices of {options.gib} GiB"
    print(f"{network.title}, {asked_for}\n")
    print(in_columns("strategy, devices", HEADS), flush=True)
    rows = []
    for setting in settings_on(options.devices, strategies.PARALLEL_STRATEGIES):
        try:
            row = row_of(network, setting, options.batch, options.gib * GIB)
        except StepFailed as failure:
            if setting.strategy == ONE_DEVICE:
                raise
            print_failure(f"{setting.name}: {failure}")
            continue
        rows.append(row)
        print_row(row)
    print(LEGEND)
    return rows


def row_of(network: UserNetwork, setting: Setting, batch: int, limit: int) -> MemoryRow:
    """The memory of a global batch, and the largest for `limit` bytes a device. Raises StepFailed if its step fails."""
    with simulated_training(network, setting) as training:
        peaks = training.peaks_of_step(batch // setting.devices)
        try:
            largest = largest_batch(lambda samples: max(totals(training.peaks_of_step(samples))), limit)
        except StepFailed as error:
            return MemoryRow(setting, peaks, fits=None, failure=str(error))
    return MemoryRow(setting, peaks, fits=setting.devices * largest)


def largest_batch(bytes_of: Callable[[int], int], limit: int) -> int:
    """The most samples, known to an eighth, of which a step takes at most `limit` bytes; 0 if not SMALLEST_BATCH.

    Raises:
        StepFailed: if LARGEST_BATCH fits: the network's own batches do not grow with the number of samples.
    """
    fitting = 0
    too_many = SMALLEST_BATCH
    while (size := bytes_of(too_many)) <= limit:
        fitting = too_many
        if fitting >= LARGEST_BATCH:
            raise StepFailed(f"a step of {fitting} samples needs no more memory than one of fewer")
        too_many *= 2
        # Twice the samples need at most twice the bytes, unless each is compared with each. Of the numbers that should
        # therefore fit only the last is tried, up to 16 times as many: far more might not even be allocated.
        should_fit = min(limit // size, 16) * fitting
        while 2 * too_many <= should_fit:
            too_many *= 2
    while fitting and too_many - fitting > max(fitting // 8, 1):
        middle = (fitting + too_many) // 2
        if bytes_of(middle) <= limit:
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
        model = network.make_model()
        with failing_as(f"{setting.strategy} cannot wrap {network.title}"):
            self.model = strategies.wrap(model, setting.strategy, mesh)
        for parameter in self.model.parameters():
            label(parameter, "parameters")
        self.optimizer = strategies.make_optimizer(network, self.model, setting.strategy)

    def peaks_of_step(self, samples: int) -> Peaks:
        """Take a step of so many samples on each device, and return its peaks."""
        self.tracker.reset_peaks()
        if self.setting.strategy == DATA_PARALLEL:
            samples *= self.setting.devices  # one process has the inputs of all devices, and cuts them
        # The loop of a training holds the batch until the next one: it lies on the device during backward too.
        batch = self.network.make_batch(samples)
        self.network.take_step(self.model, self.optimizer, batch)
        return list(self.tracker.peaks().values())


@contextmanager
def simulated_training(network: UserNetwork, setting: Setting) -> Iterator[Training]:
    """The training on rank 0 of a fake process group, after a warm-up. Raises what `Training` raises."""
    with strategies.fake_group(setting.devices) as mesh, without_computing(), track_replicas() as tracker:
        training = Training(network, setting, mesh, tracker)
        for _ in range(WARM_UP_STEPS):
            training.peaks_of_step(SMALLEST_BATCH)
        yield training


def print_row(row: MemoryRow) -> None:
    """Print one line of the columns in HEADS, and below it why the search for the largest batch has failed, if so."""
    sums = totals(row.peaks)
    fullest = row.peaks[sums.index(max(sums))]
    only_rank_0_is_known = len(sums) < row.setting.devices
    least = "–" if only_rank_0_is_known else mib(min(sums))
    fits = "?" if row.fits is None else str(row.fits or "–")
    cells = [*map(mib, fullest.values()), mib(max(sums)), least, fits]
    print(in_columns(row.setting.name, cells), flush=True)
    if row.failure:
        print_failure(f"?: {row.failure}")


def print_failure(text: str) -> None:
    print(fill(text, TERMINAL_COLUMNS, subsequent_indent="  "), flush=True)


def in_columns(name: str, cells: Sequence[str]) -> str:
    return f"{name:<17}" + "".join(f" {cell:>6}" for cell in cells)
