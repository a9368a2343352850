"""How long does a step take here, on one device and, under DataParallel and DDP, on several of this machine?

A device is a GPU. On a machine without GPUs it is an equal part of the cores (see `common.cores`), so that level 00 has
as much to compute with as each rank of the others. All rows have the same global batch, which every step takes from the
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
from benchmarks.your_network import spec
from benchmarks.your_network.answers import milliseconds, write_json
from benchmarks.your_network.errors import StepFailed
from benchmarks.your_network.step_rank import Work, time_steps
from common.cores import available_cores
from common.errors import fail
from common.processes import RankFailed, ranks

NAMES = {"00": "raw loop", "01": "DataParallel", "02": "DDP"}
SECONDS = 1.0  # that one sample takes, about
MOST_STEPS = 50  # of one sample
TIMEOUT = 900  # seconds, for any one sample


class Row(NamedTuple):
    """A level on so many devices."""

    level: str
    devices: int

    @property
    def name(self) -> str:
        return f"{self.level} {NAMES[self.level]}, {self.devices}"

    def sample(self, work: Work, steps: int) -> float:
        """Seconds of a step of the slowest process.

        Raises:
            StepFailed: if a process fails.
        """
        processes = self.devices if self.level == "02" else 1
        pool = ranks(processes, on_cpu=work.cores_per_device is not None)
        try:
            return max(pool.run(time_steps, work, self.level, self.devices, steps, timeout=TIMEOUT))
        except RankFailed as error:
            lines = str(error).splitlines()
            raised = [line for line in lines if "no answer" not in line]  # others waited for these ranks
            reason = (raised or lines)[0]
            raise StepFailed(f"{self.name} cannot (--level leaves it out): {reason}") from error


def answer(options: argparse.Namespace) -> None:
    rows = rows_of(options.level, sorted(set(options.devices)))
    devices = max(row.devices for row in rows)
    for row in rows:
        if options.batch % row.devices:
            fail(f"argument --batch: {options.batch} samples cannot be divided among {row.devices} devices")
    cores = cores_per_device(devices)
    device = f"{cores} of this machine's {available_cores()} cores"
    if cores is None:
        device = torch.cuda.get_device_name()
    network = spec.load(options.spec, options.input, options.optimizer)
    work = Work(options.spec, options.input, options.optimizer, options.batch, cores)
    # Each row runs a step for it, uncounted.
    seconds = statistics.median(row.sample(work, steps=1) for row in rows)
    steps = max(1, min(round(SECONDS / seconds), MOST_STEPS))
    print(f"{network.title}, global batch {options.batch}, {options.rounds} rounds; a device is {device}.", flush=True)
    with tqdm(range(options.rounds), leave=False, disable=None) as turns:
        samples = measure({row.name: partial(row.sample, work, steps) for row in rows}, turns)
    found = [record(row, samples, rows[0]) for row in rows]
    print()
    print_table(found, options.batch)
    write_json(options, {"rounds": options.rounds, "cores_per_device": cores, "steps": steps, "measure": found})


def rows_of(levels: Sequence[str], devices: Sequence[int]) -> list[Row]:
    """Level 00 on one device, level 01 on several, level 02 on each number of devices."""
    several = [count for count in devices if count > 1]
    counts = {"00": [1], "01": several, "02": devices}
    rows = []
    for level in sorted(set(levels)):
        rows += [Row(level, count) for count in counts[level]]
    if not rows:
        fail("level 01 needs more than one device: give --devices 2")
    return rows


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


def record(row: Row, samples: Samples, first: Row) -> dict:
    """A row as the table shows it and as JSON keeps it."""
    speed_ups = ratios(samples[first.name], samples[row.name])
    return {
        "name": row.name,
        "level": row.level,
        "devices": row.devices,
        "samples": samples[row.name],
        "seconds": statistics.median(samples[row.name]),
        "speed_up": statistics.median(speed_ups),
        "interval": interval_of_median(speed_ups),
    }


def print_table(found: Sequence[dict], batch: int) -> None:
    """Print the rows in 61 columns."""
    print(f"{'level, devices':<18}{'ms a step':>11}{'samples/s':>11}{'faster':>8}{'interval':>13}")
    for row in found:
        rate = batch / row["seconds"]
        interval = "{:.2f}–{:.2f}".format(*row["interval"])
        times = f"{milliseconds(row['seconds']):>11}{rate:>11,.1f}"
        print(f"{row['name']:<18}{times}{row['speed_up']:>7.2f}×{interval:>13}")
    print()
    print(f"faster: than {found[0]['name']}, round by round; interval: of the median.")
