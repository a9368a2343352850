"""How long does a step take here, on one device and, under DataParallel and DDP, on several of this machine?

A device is a GPU. On a machine without GPUs it is an equal part of the cores (see `common.cores`), so that one device
has as much to compute with as each of several. All rows have the same global batch, which every step takes from the
host's memory, and take turns (`benchmarks.harness.paired`).
"""

import argparse
import statistics
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from tqdm import tqdm

from benchmarks.harness.paired import Samples, interval_of_median, measure, ratios
from benchmarks.harness.rows import DATA_PARALLEL, DDP
from benchmarks.your_network import spec
from benchmarks.your_network.errors import StepFailed
from benchmarks.your_network.formats import milliseconds
from benchmarks.your_network.timed_steps import ONE_DEVICE, Work, time_steps
from common.cores import available_cores
from common.errors import fail
from common.processes import RankFailed, ranks

SECONDS = 1.0  # that one sample takes, about
MOST_STEPS = 50  # of one sample
TIMEOUT = 900  # seconds, for any one sample


class Row(NamedTuple):
    """A way to train on so many devices."""

    way: str
    devices: int

    @property
    def name(self) -> str:
        return self.way if self.devices == 1 else f"{self.way}, {self.devices}"

    def sample(self, work: Work, steps: int) -> float:
        """Seconds of a step of the slowest process.

        Raises:
            StepFailed: if a process fails.
        """
        processes = self.devices if self.way == DDP else 1
        pool = ranks(processes, on_cpu=work.cores_per_device is not None)
        try:
            return max(pool.run(time_steps, work, self.way, self.devices, steps, timeout=TIMEOUT))
        except RankFailed as error:
            lines = str(error).splitlines()
            raised = [line for line in lines if "no answer" not in line]  # others waited for these ranks
            raise StepFailed(f"{self.name} cannot: {(raised or lines)[0]}") from error


def answer(options: argparse.Namespace) -> Samples:
    """Print a table; seconds of a step of each row in each round."""
    devices = sorted({1, *options.devices})
    for count in devices:
        if options.batch % count:
            fail(f"argument --batch: {options.batch} samples cannot be divided among {count} devices")
    cores = cores_per_device(devices[-1])
    device = f"{cores} of this machine's {available_cores()} cores"
    if cores is None:
        device = torch.cuda.get_device_name()
    network = spec.load(options.spec, options.input)
    work = Work(options.spec, options.input, options.batch, cores)
    seconds = seconds_of(work, rows_on(devices))
    steps = max(1, min(round(SECONDS / statistics.median(seconds.values())), MOST_STEPS))
    print(f"{network.title}, global batch {options.batch}, {options.rounds} rounds; a device is {device}.", flush=True)
    with tqdm(range(options.rounds), leave=False, disable=None) as rounds:
        samples = measure({row.name: partial(row.sample, work, steps) for row in seconds}, rounds)
    print_table(samples, options.batch)
    return samples


def rows_on(devices: Sequence[int]) -> list[Row]:
    """One device, and on several both ways."""
    rows = [Row(ONE_DEVICE, 1)]
    for count in devices:
        if count > 1:
            rows += [Row(DATA_PARALLEL, count), Row(DDP, count)]
    return rows


def seconds_of(work: Work, rows: Sequence[Row]) -> dict[Row, float]:
    """Roughly the seconds of a step of each row; a row that cannot train this network is left out, and it is said why.

    Raises:
        StepFailed: if one device cannot train it either.
    """
    seconds = {}
    for row in rows:
        try:
            seconds[row] = row.sample(work, steps=1)
        except StepFailed as error:
            if row.way == ONE_DEVICE:
                raise
            print(error)
    return seconds


def cores_per_device(devices: int) -> int | None:
    """The cores of each device; None where the devices are GPUs.

    Raises:
        UserError: if the machine has not so many GPUs or cores.
    """
    gpus = torch.cuda.device_count()
    cores = available_cores()
    if 0 < gpus < devices:
        fail(f"this machine has {gpus} GPUs, not {devices}; without them (CUDA_VISIBLE_DEVICES=) devices are cores")
    if gpus:
        return None
    if cores < devices:
        fail(f"{devices} devices need more than this machine's {cores} cores")
    return cores // devices


def print_table(samples: Samples, batch: int) -> None:
    """Print the rows in 61 columns."""
    print(f"\n{'devices':<18}{'ms a step':>11}{'samples/s':>11}{'faster':>8}{'interval':>13}")
    for name, own in samples.items():
        seconds = statistics.median(own)
        speed_ups = ratios(samples[ONE_DEVICE], own)
        faster = f"{statistics.median(speed_ups):.2f}×"
        interval = interval_of_median(speed_ups)
        ends = f"{interval.low:.2f}–{interval.high:.2f}"
        print(f"{name:<18}{milliseconds(seconds):>11}{batch / seconds:>11,.1f}{faster:>8}{ends:>13}")
    print(f"\nfaster: than {ONE_DEVICE}, round by round; interval: of the median.")
