"""The memory that each strategy takes on each device, and the largest batch that fits.

Nothing is computed (`simulated_training`), so a step of a million samples takes no longer than a step of two.
"""

import argparse
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from textwrap import fill

import torch

from benchmarks.harness.formats import mib
from benchmarks.harness.records import totals
from benchmarks.harness.rows import ONE_DEVICE
from benchmarks.your_network.errors import StepFailed
from benchmarks.your_network.simulated_training import Peaks, simulated_training
from benchmarks.your_network.spec import load
from benchmarks.your_network.strategies import PARALLEL_STRATEGIES, Setting, add_global_batch, settings_for
from benchmarks.your_network.user_network import SMALLEST_BATCH, UserNetwork
from common.flag_types import positive

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


def add_flags(parser: argparse.ArgumentParser) -> None:
    flag = parser.add_argument
    add_global_batch(parser)
    flag("--devices", type=positive, nargs="+", default=[1, 8], metavar="N", help="how many (1 8)")
    flag("--precision", choices=PRECISIONS, default="no", help="of mixed precision (no)")
    flag("--checkpointing", action="store_true", help="activation checkpointing of each block")
    flag("--gib", type=positive, default=24, metavar="N", help="memory of a device, for the largest batch (24)")


@dataclass(frozen=True)
class MemoryRow:
    """The memory of a setting.

    Attributes:
        peaks: those of a step with the global batch that was asked for.
        fits: the largest global batch that fits, and 0 if none does. The search for it may fail, for example where
            the user's file cannot make a large batch.
    """

    setting: Setting
    peaks: Peaks
    fits: int | StepFailed


def answer(options: argparse.Namespace) -> list[MemoryRow]:
    """Print a row for each setting as soon as it is known. Returns the rows of those that can train the network.

    Raises StepFailed if one device cannot train it.
    """
    settings = settings_for(options.batch, options.devices, PARALLEL_STRATEGIES)
    network = load(options.spec, options.input)
    network = replace(network, autocast=PRECISIONS[options.precision], checkpointing=options.checkpointing)
    asked_for = f"global batch {options.batch}, mixed precision: {options.precision}, devices of {options.gib} GiB"
    print(f"{network.title}, {asked_for}\n")
    print(in_columns("strategy, devices", HEADS), flush=True)
    rows = []
    for setting in settings:
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
        except StepFailed as failure:
            return MemoryRow(setting, peaks, failure)
    return MemoryRow(setting, peaks, setting.devices * largest)


def largest_batch(bytes_of: Callable[[int], int], limit: int) -> int:
    """The most samples, known to an eighth, of which a step takes at most `limit` bytes; 0 if not SMALLEST_BATCH.

    Raises:
        StepFailed: if LARGEST_BATCH fits: the network's own batches do not grow with the number of samples.
    """
    # It begins at the smallest, because the user's file, or the address space, may have no room for far too many.
    fitting = 0
    too_many = SMALLEST_BATCH
    while bytes_of(too_many) <= limit:
        if too_many >= LARGEST_BATCH:
            raise StepFailed(f"a step of {too_many} samples needs no more memory than one of fewer")
        fitting = too_many
        too_many *= 2
    if not fitting:
        return 0
    sizes = [fitting * eighths // 8 for eighths in range(8, 16)]
    smallest_too_many = bisect_right(sizes, limit, lo=1, key=bytes_of)
    return sizes[smallest_too_many - 1]


def print_row(row: MemoryRow) -> None:
    """Print one line of the columns in HEADS, and below it why the search for the largest batch has failed, if so."""
    sums = totals(row.peaks)
    fullest = row.peaks[sums.index(max(sums))]
    only_rank_0_is_known = len(sums) < row.setting.devices
    least = "–" if only_rank_0_is_known else mib(min(sums))
    search_failed = isinstance(row.fits, StepFailed)
    fits = "?" if search_failed else str(row.fits or "–")
    cells = [*map(mib, fullest.values()), mib(max(sums)), least, fits]
    print(in_columns(row.setting.name, cells), flush=True)
    if search_failed:
        print_failure(f"?: {row.fits}")


def print_failure(text: str) -> None:
    print(fill(text, TERMINAL_COLUMNS, subsequent_indent="  "), flush=True)


def in_columns(name: str, cells: Sequence[str]) -> str:
    return f"{name:<17}" + "".join(f" {cell:>6}" for cell in cells)
