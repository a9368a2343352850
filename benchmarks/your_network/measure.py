"""How long does a step take here, at each level and on so many devices of this machine?

A device is a GPU. On a machine without GPUs it is an equal part of the cores (see `common.cores`), so that level 00 has
as much to compute with as each rank of the others. All rows have the same global batch, which every step takes from the
host's memory, and take turns (`benchmarks.harness.paired`).
"""

import argparse
import math
import statistics
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from tqdm import tqdm

from benchmarks.harness.paired import Samples, bootstrap, measure, ratios, summarise
from benchmarks.your_network import spec, step_rank
from benchmarks.your_network.answers import milliseconds, write_json
from benchmarks.your_network.errors import StepFailed
from benchmarks.your_network.step_rank import RAW, REPLICATED, Work
from common.cores import available_cores
from common.errors import fail
from common.processes import RankFailed, ranks

NAMES = {"00": "raw loop", "01": "DataParallel", "02": "DDP", "03": "core", "04": "Trainer"}
WARM_UP_STEPS = 2  # DDP has its final buckets from the second step on
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
        processes = 1 if self.level in (RAW, REPLICATED) else self.devices
        pool = ranks(processes, on_cpu=work.cores_per_device is not None)
        job = (step_rank.time_steps, work, self.level, self.devices, WARM_UP_STEPS, steps)
        try:
            return max(pool.run(*job, timeout=TIMEOUT))
        except RankFailed as error:
            lines = [line for line in str(error).splitlines() if line.startswith("rank ")]
            raised = [line for line in lines if "no answer" not in line]
            raise StepFailed(f"{self.name} cannot (--level leaves it out): {(raised or lines)[0]}") from error


def answer(options: argparse.Namespace) -> None:
    rows = contestants(options.level, sorted(set(options.devices)))
    devices = max(row.devices for row in rows)
    for row in rows:
        if options.batch % row.devices:
            fail(f"argument --batch: {options.batch} samples cannot be divided among {row.devices} devices")
    cores = cores_per_device(devices, options.cores_per_device)
    device = torch.cuda.get_device_name() if cores is None else f"{cores} of this machine's {available_cores()} cores"
    network = spec.load(options.spec, options.input, options.optimizer)
    print(f"{network.title}, global batch {options.batch}, {options.rounds} rounds; a device is {device}.", flush=True)
    work = Work(options.spec, options.input, options.optimizer, options.batch, cores)
    steps = steps_of_a_sample(rows, work, options.rounds, 60 * options.minutes)
    with tqdm(range(options.rounds), leave=False, disable=None) as turns:
        samples = measure({row.name: partial(row.sample, work, steps) for row in rows}, turns)
    found = [record(row, samples, rows[0]) for row in rows]
    print()
    print_table(found, options.batch)
    write_json(options, {"rounds": options.rounds, "cores_per_device": cores, "steps": steps, "measure": found})


def contestants(levels: Sequence[str], devices: Sequence[int]) -> list[Row]:
    """Level 00 on one device, level 01 on several, the others on each number of devices."""
    rows = []
    for level in sorted(set(levels)):
        if level == RAW:
            rows.append(Row(RAW, 1))
        else:
            rows += [Row(level, count) for count in devices if count > 1 or level != REPLICATED]
    if not rows:
        fail("level 01 needs more than one device: give --devices 2")
    return rows


def cores_per_device(devices: int, wanted: int | None) -> int | None:
    """The cores of each device; None where the devices are GPUs.

    Raises:
        UserError: if the machine has not so many GPUs or cores.
    """
    gpus = torch.cuda.device_count()
    if gpus and wanted is None:
        if gpus < devices:
            fail(f"this machine has {gpus} GPU{'s' * (gpus > 1)}, not {devices}; --cores-per-device measures on cores")
        return None
    cores = available_cores()
    share = wanted or cores // devices
    if share == 0 or share * devices > cores:
        fail(f"{devices} devices of {max(1, share)} cores each need more than this machine's {cores} cores")
    return share


def steps_of_a_sample(rows: Sequence[Row], work: Work, rounds: int, limit: float) -> int:
    """The steps that take about SECONDS. Each row runs one for it, uncounted.

    Raises:
        UserError: if all rounds would take more than `limit` seconds.
        StepFailed: if a row cannot be measured.
    """
    seconds: list[float] = []
    steps = 1
    for row in rows:
        seconds.append(row.sample(work, steps=1))
        steps = max(1, min(round(SECONDS / statistics.median(seconds)), MOST_STEPS))
        # Each row says already whether the others would take hours.
        needed = rounds * (WARM_UP_STEPS + steps) * sum(seconds)
        if needed > limit:
            minutes = math.ceil(needed / 60)
            fail(f"all would take at least {minutes} minutes here. Give a smaller --batch, or more --minutes")
    return steps


def record(row: Row, samples: Samples, first: Row) -> dict:
    """A row as the table shows it and as JSON keeps it."""
    times = summarise(samples[row.name])
    speed_ups = ratios(samples[first.name], samples[row.name])
    interval = bootstrap(speed_ups)
    return {
        "name": row.name,
        "level": row.level,
        "devices": row.devices,
        "samples": samples[row.name],
        "seconds": times.median,
        "low": times.low,
        "high": times.high,
        "noisy": times.noisy,
        "speed_up": statistics.median(speed_ups),
        "interval": [interval.low, interval.high],
    }


def print_table(found: Sequence[dict], batch: int) -> None:
    """Print the rows in 76 columns."""
    print(f"{'level, devices':<17}{'ms a step':>11}{'middle half':>15}{'samples/s':>11}{'faster':>8}{'interval':>13}")
    for row in found:
        times = f"{milliseconds(row['low'])}–{milliseconds(row['high'])}"
        interval = "{:.2f}–{:.2f}".format(*row["interval"])
        rate = batch / row["seconds"]
        line = f"{row['name']:<17}{milliseconds(row['seconds']):>11}{times:>15}{rate:>11,.1f}{row['speed_up']:>7.2f}×"
        print(f"{line}{interval:>13}{'!' if row['noisy'] else ''}")
    print()
    print(f"faster: than {found[0]['name']}, round by round, and the interval of the median.")
    print("!: noisy, the middle half is wide; more --rounds would settle it.")
