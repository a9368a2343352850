"""How long does a step take here, at each level and on so many devices of this machine?

A device is a GPU. On a machine without GPUs it is an equal part of the cores (see `common.cores`), so that level 00 has
as much to compute with as each rank of the others. All rows have the same global batch, which every step takes from the
host's memory, and take turns (`benchmarks.harness.paired`).

The shares of DDP's step come from the same ranks, which also train some steps without averaging their gradients. A step
of the slowest rank without it is computing; the part that the average rank computes less is waiting; what averaging
makes the step longer is the part of the all-reduces that backward does not hide.
"""

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from textwrap import fill
from typing import NamedTuple

import torch
from tqdm import tqdm

from benchmarks.harness.paired import Samples, bootstrap, measure, ratios, summarise
from benchmarks.your_network import spec, step_rank
from benchmarks.your_network.answers import conclude, milliseconds
from benchmarks.your_network.errors import StepFailed
from benchmarks.your_network.step_rank import DDP, RAW, REPLICATED, Measured, Work
from common.cores import available_cores
from common.errors import fail
from common.processes import RankFailed, ranks

NAMES = {"00": "raw loop", "01": "DataParallel", "02": "DDP", "03": "core", "04": "Trainer"}
WARM_UP_STEPS = 2  # DDP has its final buckets from the second step on
SECONDS = 1.0  # that one sample takes, about
MOST_STEPS = 50  # of one sample
TIMEOUT = 900  # seconds, for any one sample


class Shares(NamedTuple):
    """What the ranks of DDP do in a step, as shares of it that add up to 1."""

    computing: float
    waiting: float
    all_reduce: float


@dataclass
class Row:
    """A level on so many devices.

    Attributes:
        shares: of a step of DDP on several devices, one for each sample.
        problem: why it cannot be measured, or "".
    """

    level: str
    devices: int
    shares: list[Shares] = field(default_factory=list)
    problem: str = ""

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
            results = pool.run(*job, timeout=TIMEOUT)
        except RankFailed as error:
            lines = [line for line in str(error).splitlines() if line.startswith("rank ")]
            raised = [line for line in lines if "no answer" not in line]
            raise StepFailed((raised or lines)[0]) from error
        seconds = max(result.seconds for result in results)
        if self.level == DDP and self.devices > 1:
            self.shares.append(shares(seconds, results))
        return seconds


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
    measured = [row for row in rows if not row.problem]
    with tqdm(range(options.rounds), leave=False, disable=None) as turns:
        samples = measure({row.name: partial(row.sample, work, steps) for row in measured}, turns)
    found = [record(row, samples, measured[0]) for row in measured]
    print()
    print_table(found, options.batch)
    problems = {row.name: row.problem for row in rows if row.problem}
    for name, problem in problems.items():
        print(fill(f"{name} cannot: {problem}", 80))
    about = {"batch": options.batch, "rounds": options.rounds, "cores_per_device": cores, "steps": steps}
    conclude(options, facts(found, options.batch), {**about, "cannot": problems, "measure": found})


def contestants(levels: Sequence[str], devices: Sequence[int]) -> list[Row]:
    """Level 00 on one device, level 01 on several, the others on each number of devices."""
    rows = []
    for level in sorted(set(levels)):
        if level == RAW:
            rows.append(Row(RAW, 1))
            continue
        counts = [count for count in devices if count > 1 or level != REPLICATED]
        rows += [Row(level, count) for count in counts]
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
    """The steps that take about SECONDS. Each row runs one for it, uncounted; one that fails has a problem then.

    Raises:
        UserError: if no row can be measured, or all rounds would take more than `limit` seconds.
    """
    seconds: list[float] = []
    for row in rows:
        try:
            seconds.append(row.sample(work, steps=1))
        except StepFailed as error:
            row.problem = str(error)
        row.shares.clear()
        # Each row says already whether the others would take hours.
        check_time(sum(seconds), rounds, 1, limit)
    if not seconds:
        fail(f"{rows[0].name} cannot: {rows[0].problem}")
    steps = max(1, min(round(SECONDS / statistics.median(seconds)), MOST_STEPS))
    check_time(sum(seconds), rounds, steps, limit)
    return steps


def check_time(step_of_all: float, rounds: int, steps: int, limit: float) -> None:
    """Raises UserError if the rounds take longer than `limit` seconds. `step_of_all`: seconds of a step of each row."""
    needed = rounds * (WARM_UP_STEPS + steps) * step_of_all
    if needed > limit:
        minutes = math.ceil(needed / 60)
        fail(f"all would take at least {minutes} minutes here. Give a smaller --batch, or more --minutes")


def shares(step: float, results: list[Measured]) -> Shares:
    """The shares of a step of DDP whose ranks have also trained without averaging."""
    alone = [result.alone for result in results]
    slowest = min(max(alone), step)  # a lone step that was disturbed may be longer
    computing = min(statistics.mean(alone), slowest)
    return Shares(computing / step, (slowest - computing) / step, (step - slowest) / step)


def record(row: Row, samples: Samples, first: Row) -> dict:
    """A row as the table shows it and as JSON keeps it."""
    times = summarise(samples[row.name])
    speed_ups = ratios(samples[first.name], samples[row.name])
    interval = bootstrap(speed_ups)
    medians = [statistics.median(column) for column in zip(*row.shares, strict=True)]
    return asdict(row) | {
        "name": row.name,
        "samples": samples[row.name],
        "seconds": times.median,
        "low": times.low,
        "high": times.high,
        "noisy": times.noisy,
        "speed_up": statistics.median(speed_ups),
        "interval": [interval.low, interval.high],
        "shares": Shares(*medians)._asdict() if medians else None,
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
    print("!: noisy, the middle half is wide.")


def facts(found: Sequence[dict], batch: int) -> list[str]:
    """The fastest row, what the ranks of DDP do in a step, and how sure that is."""
    first = found[0]
    # Only more devices save time. A row that seems faster on as many as the first row has is noise.
    larger = [row for row in found if row["devices"] > first["devices"]]
    best = max(larger, key=lambda row: row["speed_up"], default=first)
    interval = "{:.2f} to {:.2f}".format(*best["interval"])
    lines = [f"Fastest on more devices: {best['name']}, {best['speed_up']:.2f}× {first['name']} ({interval})."]
    if best is first or best["speed_up"] < 1:
        lines = [f"Fastest: {first['name']}, {batch / first['seconds']:,.1f} samples/s."]
    for row in found:
        if row["shares"]:
            lines.append(
                "Of a step of {name}: {computing:.0%} computing, {waiting:.0%} waiting for the slowest rank, "
                "{all_reduce:.0%} all-reduce that backward does not hide.".format(name=row["name"], **row["shares"])
            )
    noisy = [row["name"] for row in found if row["noisy"]]
    lines.append(f"Noisy rows, which more --rounds would settle: {'; '.join(noisy) or 'none'}.")
    return lines
