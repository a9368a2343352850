"""Question 3: how long does a step take here, at each level and on so many devices of this machine?

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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from benchmarks.harness.paired import FEWEST_ROUNDS, Samples, bootstrap, measure, ratios, summarise
from benchmarks.predict.table import milliseconds
from benchmarks.your_network import answers, memory, predict, step_rank, strategies
from benchmarks.your_network.memory import Setting
from benchmarks.your_network.spec import UserNetwork
from benchmarks.your_network.step_rank import DDP, RAW, REPLICATED, Measured, Work
from benchmarks.your_network.training import StepFailed
from common.cores import available_cores
from common.errors import fail
from common.processes import RankFailed, ranks

NAMES = {"00": "raw loop", "01": "DataParallel", "02": "DDP", "03": "core", "04": "Trainer"}
WARM_UP_STEPS = 2  # DDP has its final buckets from the second step on
SECONDS = 1.0  # that one sample takes, about
MOST_STEPS = 50  # of one sample
MEMORY = Path("/proc/meminfo")
TIMEOUT = 900  # seconds, for any one sample
FASTER = 1.05  # the speed-up from which on devices are worth their while
WORTH_SAYING = 0.005  # of a step: the part of the all-reduces from which on it is said
STEP_IS_FORWARDS = 3  # backward multiplies twice as much as forward


@dataclass(frozen=True)
class Row:
    """A level on so many devices."""

    level: str
    devices: int

    @property
    def name(self) -> str:
        return f"{self.level} {NAMES[self.level]}, {self.devices}"

    @property
    def processes(self) -> int:
        return 1 if self.level in (RAW, REPLICATED) else self.devices

    @property
    def setting(self) -> Setting:
        """What the accounting of memory takes for it."""
        if self.level == RAW:
            return Setting(strategies.ONE_DEVICE, 1)
        return Setting(strategies.DATA_PARALLEL if self.level == REPLICATED else strategies.DDP, self.devices)

    def run(self, work: Work, warm_up: int, steps: int) -> list[Measured]:
        """What every process has measured.

        Raises:
            StepFailed: if a process fails.
        """
        pool = ranks(self.processes, on_cpu=work.cores_per_device is not None)
        try:
            return pool.run(step_rank.time_steps, work, self.level, self.devices, warm_up, steps, timeout=TIMEOUT)
        except RankFailed as error:
            raise StepFailed(self.name, _first_line(error)) from error


def _first_line(error: RankFailed) -> str:
    """What the first rank that raised says, without its traceback."""
    lines = [line for line in str(error).splitlines() if line.startswith("rank ")]
    raised = [line for line in lines if "no answer" not in line]
    return (raised or lines)[0]


class Shares(NamedTuple):
    """Of a step of DDP: what its ranks do, as shares that add up to 1."""

    computing: float
    waiting: float
    all_reduce: float


def answer(options: argparse.Namespace) -> None:
    rows = contestants(options.level, sorted(set(options.devices)))
    devices = max(row.devices for row in rows)
    for row in rows:
        if options.batch % row.devices:
            fail(f"argument --batch: {options.batch} samples cannot be divided among {row.devices} devices")
    cores = cores_per_device(devices, options.cores_per_device)
    network = answers.network(options)
    work = Work(options.spec, options.input, options.optimizer, options.batch, cores)
    simulated, cannot = simulate(network, rows, options.batch)
    check_memory(simulated, cores is None)
    check_time(network, work, list(simulated), options.rounds, 60 * options.minutes)
    print(heading(network, work, devices, options.rounds))
    answers.print_assumption(network)
    timing = Timing(work, list(simulated), options.rounds, 60 * options.minutes)
    cannot |= timing.cannot
    with tqdm(range(options.rounds), leave=False, disable=None) as turns:
        samples = measure({row.name: partial(timing.sample, row) for row in timing.rows}, turns)
    found = [record(row, samples, timing.rows[0], simulated[row], timing) for row in timing.rows]
    print()
    print(table(found, options.batch))
    for row, reason in cannot.items():
        print(fill(f"{row.name} cannot: {reason}", 80))
    for row in timing.rows:
        if row.name in timing.shares:
            print(shares_line(row, timing.shares[row.name]))
    about: dict[str, Any] = {"batch": options.batch, "rounds": options.rounds, "cores_per_device": cores}
    about |= {"steps": timing.steps, "cannot": {row.name: reason for row, reason in cannot.items()}}
    answers.conclude(options, verdict(found, options.batch), {**about, "measure": found})


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


def simulate(network: UserNetwork, rows: Sequence[Row], batch: int) -> tuple[dict[Row, list[int]], dict[Row, str]]:
    """The simulated bytes of each device at its peak, by row; and the rows that cannot train this network, and why.

    Raises:
        StepFailed: if one device cannot train it either.
    """
    simulated: dict[Row, list[int]] = {}
    cannot: dict[Row, str] = {}
    for row in rows:
        try:
            simulated[row] = needs(network, row, batch)
        except StepFailed as error:
            memory.check_alone(network, row.setting, batch)
            cannot[row] = str(error)
    if not simulated:
        fail(f"{rows[0].name} cannot: {cannot[rows[0]]}")
    return simulated, cannot


def needs(network: UserNetwork, row: Row, batch: int) -> list[int]:
    """The simulated bytes of each device at its peak.

    Raises:
        StepFailed: if the row cannot train the network.
    """
    found = memory.need(network, row.setting, batch)
    return found.peaks if len(found.peaks) == row.devices else found.peaks * row.devices


def check_memory(simulated: dict[Row, list[int]], on_gpus: bool) -> None:
    """Raises UserError if the rows do not fit."""
    if on_gpus:
        for row, peaks in simulated.items():
            free = min(torch.cuda.mem_get_info(device)[0] for device in range(row.devices))
            _check_fits(f"{row.name} would need {_gib(max(peaks))} on a GPU", max(peaks), free)
        return
    # All processes share the machine's memory. Those of one number of processes keep their blocks from row to row.
    of_pools: dict[int, int] = {}
    for row, peaks in simulated.items():
        of_pools[row.processes] = max(sum(peaks), of_pools.get(row.processes, 0))
    needed = sum(of_pools.values())
    _check_fits(f"the processes would need {_gib(needed)}", needed, _free_memory())


def _check_fits(what: str, needed: float, free: float) -> None:
    if needed > free:
        fail(f"{what}, where {_gib(free)} are free: give a smaller --batch")


def _free_memory() -> float:
    """Bytes that the system can give away; infinite where it does not say."""
    if not MEMORY.exists():
        return float("inf")
    lines = MEMORY.read_text().splitlines()
    kibibytes = next(line.split()[1] for line in lines if line.startswith("MemAvailable"))
    return int(kibibytes) * 1024


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def check_time(network: UserNetwork, work: Work, rows: list[Row], rounds: int, limit: float) -> None:
    """Raises UserError if even the speed of a bare product of matrices would not do."""
    pool = ranks(1, on_cpu=work.cores_per_device is not None)
    (rate,) = pool.run(step_rank.operations_per_second, work, timeout=60)
    step = STEP_IS_FORWARDS * predict.counted(network).multiply_adds * work.batch / rate
    steps = (1 + rounds) * (WARM_UP_STEPS + 1)
    seconds = sum(step * steps / row.devices for row in rows)
    _check_limit(f"a step of {work.batch} samples takes at least {step:.1f} s on a device here", seconds, limit)


def _check_limit(why: str, seconds: float, limit: float) -> None:
    if seconds > limit:
        minutes = math.ceil(seconds / 60)
        fail(f"{why}: all would take some {minutes} minutes. Give a smaller --batch, or --minutes {minutes}")


class Timing:
    """The contestants' samples, and what else they have measured.

    Making one runs each contestant once, uncounted, which tells how many steps take about SECONDS.

    Attributes:
        rows: the contestants that can train this network.
        cannot: why the others cannot.
        steps: of one sample, the same for all.
        shares: of DDP's step, by row; those of the last sample.
        peaks: bytes that CUDA counted on each device, by row.
    """

    def __init__(self, work: Work, rows: list[Row], rounds: int, limit: float) -> None:
        self.work = work
        self.rows: list[Row] = []
        self.cannot: dict[Row, str] = {}
        self.peaks: dict[str, list[int]] = {}
        self.of_ddp: dict[str, list[Shares]] = {}
        self.steps = 1
        seconds: dict[str, float] = {}
        for row in rows:
            try:
                seconds[row.name] = self.sample(row)
                self.rows.append(row)
            except StepFailed as error:
                self.cannot[row] = error.reason
        if not self.rows:
            fail(f"{rows[0].name} cannot: {self.cannot[rows[0]]}")
        self.of_ddp.clear()
        wanted = round(SECONDS / statistics.median(seconds.values()))
        self.steps = max(1, min(wanted, MOST_STEPS))
        steps = WARM_UP_STEPS + self.steps
        _check_limit(
            f"a step takes up to {max(seconds.values()):.1f} s here", rounds * steps * sum(seconds.values()), limit
        )

    def sample(self, row: Row) -> float:
        """Seconds of a step of the slowest process."""
        results = row.run(self.work, WARM_UP_STEPS, self.steps)
        seconds = max(result.seconds for result in results)
        if results[0].peaks is not None:
            self.peaks[row.name] = [peak for result in results for peak in result.peaks or ()]
        if row.level == DDP and row.devices > 1:
            self.of_ddp.setdefault(row.name, []).append(shares(seconds, results))
        return seconds

    @property
    def shares(self) -> dict[str, Shares]:
        """The medians over the rounds."""
        found = {}
        for name, of_rounds in self.of_ddp.items():
            columns = [statistics.median(column) for column in zip(*of_rounds, strict=True)]
            found[name] = Shares(*columns)
        return found


def shares(step: float, results: list[Measured]) -> Shares:
    """The shares of a step of DDP whose ranks have also trained without averaging."""
    alone = [result.alone or 0.0 for result in results]
    slowest = min(max(alone), step)  # a lone step that was disturbed may be longer
    computing = min(statistics.mean(alone), slowest)
    return Shares(computing / step, (slowest - computing) / step, (step - slowest) / step)


def heading(network: UserNetwork, work: Work, devices: int, rounds: int) -> str:
    if work.cores_per_device is None:
        device = torch.cuda.get_device_name()
    else:
        device = f"{work.cores_per_device} of this machine's {available_cores()} cores"
    return f"{network.title}, global batch {work.batch}, {rounds} rounds; a device is {device}."


def record(row: Row, samples: Samples, first: Row, simulated: list[int], timing: Timing) -> dict:
    """A row as the table shows it and as JSON keeps it."""
    times = summarise(samples[row.name])
    speed_ups = ratios(samples[first.name], samples[row.name])
    interval = bootstrap(speed_ups)
    shares_of_row = timing.shares.get(row.name)
    return {
        "name": row.name,
        "level": row.level,
        "devices": row.devices,
        "samples": samples[row.name],
        "seconds": times.median,
        "low": times.low,
        "high": times.high,
        "noisy": times.noisy,
        "compared_with": first.name,
        "speed_up": statistics.median(speed_ups),
        "interval": [interval.low, interval.high],
        "shares": shares_of_row._asdict() if shares_of_row else None,
        "simulated_peaks": simulated,
        "cuda_peaks": timing.peaks.get(row.name),
    }


def table(found: list[dict], batch: int) -> str:
    """The rows in 80 columns."""
    lines = [
        f"{'level, devices':<17}{'ms a step':>11}{'middle half':>15}{'samples/s':>11}{'faster':>8}{'interval':>13}"
        f"{'MiB':>7}"
    ]
    for row in found:
        times = f"{milliseconds(row['low'])}–{milliseconds(row['high'])}"
        interval = "{:.2f}–{:.2f}".format(*row["interval"])
        rate = batch / row["seconds"]
        line = f"{row['name']:<17}{milliseconds(row['seconds']):>11}{times:>15}{rate:>11,.1f}{row['speed_up']:>7.2f}×"
        lines.append(f"{line}{interval:>13}{_mib(row):>6}{'!' if row['noisy'] else ' '}")
    lines += [
        "",
        f"faster: than {found[0]['name']}, round by round, and the interval of the median.",
        "MiB: the fullest device's peak, simulated. !: noisy, the middle half is wide.",
    ]
    for row in found:
        if row["cuda_peaks"]:
            pairs = zip(row["cuda_peaks"], row["simulated_peaks"], strict=True)
            shown = ", ".join(f"{cuda / 2**20:,.0f} ({peak / 2**20:,.0f})" for cuda, peak in pairs)
            lines.append(f"CUDA's own peak of {row['name']}: {shown} MiB (in brackets: simulated)")
    return "\n".join(lines)


def shares_line(row: Row, found: Shares) -> str:
    return (
        f"A step of {row.name} devices: {found.computing:.0%} computing, {found.waiting:.0%} waiting for the slowest "
        f"rank, {found.all_reduce:.0%} all-reduce that backward does not hide."
    )


def verdict(found: list[dict], batch: int) -> list[str]:
    """The level and number of devices to take, why, and what would change it, a line each."""
    first = found[0]
    # Only more devices save time. A row that seems faster on as many as the first row has is noise.
    larger = [row for row in found if row["devices"] > first["devices"]]
    best = max(larger, key=lambda row: row["speed_up"], default=first)
    reliable = best["interval"][0] > FASTER and len(best["samples"]) >= FEWEST_ROUNDS
    speed = f"{best['speed_up']:.2f} times as fast as {first['name']}"
    if best is first or best["speed_up"] < 1 or best["interval"][1] < FASTER:
        take = f"Stay with {first['name']} device{'s' * (first['devices'] > 1)}: nothing that was measured is faster."
    elif reliable:
        take = f"Take level {best['name']} devices: {speed} at a global batch of {batch}."
    else:
        doubt = "the interval does not settle it"
        if len(best["samples"]) < FEWEST_ROUNDS:
            doubt = f"{len(best['samples'])} rounds settle nothing: {FEWEST_ROUNDS} are the fewest"
        take = f"Perhaps level {best['name']} devices: {speed}, but {doubt}; more --rounds would."
    return [take, f"Why: {_why(found, first)}", f"What would change it: {_change(found)}"]


def _why(found: list[dict], first: dict) -> str:
    divided = [row for row in found if row["shares"]]
    if not divided:
        times = ", ".join(f"{row['name']} {milliseconds(row['seconds'])} ms" for row in found)
        return f"a step takes {times}."
    row = max(divided, key=lambda row: row["devices"])
    parts = row["shares"]
    return (
        f"{row['name']} devices compute for {parts['computing']:.0%} of a step, wait for the slowest rank for "
        f"{parts['waiting']:.0%}, and all-reduce unhidden for {parts['all_reduce']:.0%}. Each needs "
        f"{_mib(row)} MiB; {first['name']} device needs {_mib(first)}."
    )


def _mib(row: dict) -> str:
    return f"{max(row['simulated_peaks']) / 2**20:,.0f}"


def _change(found: list[dict]) -> str:
    divided = [row for row in found if row["shares"]]
    if not divided:
        return "a larger batch, which levels with several devices share; give --level 00 02 and more --devices."
    row = max(divided, key=lambda row: row["devices"])
    unhidden = row["shares"]["all_reduce"] * row["seconds"]
    of_memory = "For what lowers a device's memory, ask memory."
    if row["shares"]["all_reduce"] < WORTH_SAYING:
        return f"not a larger batch: backward hides all of the all-reduces already. {of_memory}"
    share = unhidden / (2 * row["seconds"] - unhidden)
    return (
        f"a larger batch. Backward leaves {milliseconds(unhidden)} ms of the all-reduces unhidden. With twice the "
        f"batch it is twice as long and hides no less of them, so they would add at most some {share:.0%} of a step. "
        f"{of_memory}"
    )
