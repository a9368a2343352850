"""The anatomy of a step: why each level is as fast as it is, by the milliseconds of each part of its step.

Each row is a level's own, unmodified train.py. A device is an equal part of the cores (`common.cores`), so that level
00 has as much to compute with as each rank or replica of the others. The parts are timed from outside, in every second
step; the steps between are the whole, see `benchmarks.harness.parts`. How much of the whole the parts add up to is
recorded too.

Two ranks end their averaging together. So the rank that comes late waits least, and what it spends is the cost of the
averaging itself; what the others spend beyond that is waiting for the slower rank.
"""

import statistics
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from benchmarks.harness import proof, records
from benchmarks.harness.groups import CannotMeasure, Extent, Group
from benchmarks.harness.paired import measure, ratios
from benchmarks.harness.parts import (
    AVERAGING,
    BACKWARD,
    COPIES,
    FORWARD,
    GRADIENT_NORM,
    LOADING,
    OPTIMIZER,
    PYTHON,
    WAITING,
    StepTimes,
    watching,
)
from benchmarks.suites.throughput import Configuration
from common.cores import available_cores
from common.processes import ranks

BATCH_SIZE = 64
DEVICES = 2
PARTS = (LOADING, COPIES, FORWARD, BACKWARD, AVERAGING, WAITING, GRADIENT_NORM, OPTIMIZER, PYTHON)
WARM_UP_STEPS = 3  # DDP has its final buckets from the second step on
QUICK_STEPS = 4
MOST_LEFT_OVER = 0.1  # of the whole: the parts must add up to it but for this
TIMEOUT = 300  # seconds, for any one run
TITLE = f"anatomy of a step: global batch {BATCH_SIZE}, a device is 1/{DEVICES} of the cores"


@dataclass(frozen=True)
class Row:
    """A level on so many devices: its ranks, or level 01's replicas."""

    level: str
    devices: int = 1
    batch_size: int = BATCH_SIZE

    @property
    def name(self) -> str:
        if self.batch_size != BATCH_SIZE:
            return f"{self.level}, {self.batch_size} images"
        return f"{self.level}, 1 device" if self.devices == 1 else f"{self.level}, {self.devices} devices"

    @property
    def short(self) -> str:
        """The head of a narrow column: '02 ×2', '00, 32'."""
        number = self.level[:2]
        return f"{number} ×{self.devices}" if self.batch_size == BATCH_SIZE else f"{number}, {self.batch_size}"

    def run(self, steps: int, data_flags: tuple[str, ...]) -> list[list[StepTimes]]:
        """One run of so many steps, or one more, after the warm-up, as every process has seen it."""
        cores = cores_of_a_device()
        level = Configuration(self.level, self.devices, self.batch_size, cores)
        argv = ["--device", "cpu", *level.argv(1 + WARM_UP_STEPS + steps), *data_flags]
        return ranks(level.processes, on_cpu=True).run(train, self.level, argv, cores, timeout=TIMEOUT)


ONE = Row("00_single_gpu")
SHARE = Row("00_single_gpu", batch_size=BATCH_SIZE // DEVICES)
REPLICAS = Row("01_data_parallel", DEVICES)
DDP_OF_ONE = Row("02_ddp_raw")
DDP = Row("02_ddp_raw", DEVICES)
ACCELERATOR = Row("03_accelerate", DEVICES)
TRAINER = Row("04_trainer", DEVICES)
ROWS = {row.name: row for row in (ONE, SHARE, REPLICAS, DDP_OF_ONE, DDP, ACCELERATOR, TRAINER)}
COMPARED = ((REPLICAS, ONE), (DDP_OF_ONE, ONE), (DDP, ONE), (DDP, SHARE), (ACCELERATOR, DDP), (TRAINER, ACCELERATOR))


def cores_of_a_device() -> int:
    return available_cores() // DEVICES


def train(level: str, argv: list[str], threads: int) -> list[StepTimes]:
    """In one of the processes: the level's steps on its device, after the warm-up."""
    with watching() as clock:
        proof.train(level, argv, threads)
    return clock.steps[WARM_UP_STEPS:]


class Times(NamedTuple):
    """The milliseconds of one run's step: the whole, and the parts, whose names are PARTS."""

    whole: float
    parts: dict[str, float]


def times(of_ranks: list[list[StepTimes]]) -> Times:
    """The mean step of one run, from the steps of each of its ranks."""
    alone = [step.seconds for steps in of_ranks for step in steps if step.parts is None]
    found = dict.fromkeys(PARTS, 0.0)
    watched = [[step.parts for step in steps if step.parts is not None] for steps in of_ranks]
    for part in (LOADING, COPIES, FORWARD, BACKWARD, GRADIENT_NORM, OPTIMIZER, PYTHON):
        found[part] = statistics.fmean(parts.get(part, 0.0) for steps in watched for parts in steps)
    # The n-th step of all ranks is one step: they have averaged together.
    for step_of_ranks in zip(*watched, strict=True):
        averaging = [parts.get(AVERAGING, 0.0) for parts in step_of_ranks]
        found[AVERAGING] += min(averaging) / len(watched[0])
        found[WAITING] += (statistics.fmean(averaging) - min(averaging)) / len(watched[0])
    return Times(1000 * statistics.fmean(alone), {part: 1000 * seconds for part, seconds in found.items()})


def groups() -> list[Group]:
    return [Group("anatomy", TITLE, tuple(ROWS), measured)]


def measured(extent: Extent) -> dict:
    """The record of all rows, which take turns: a sample is the whole of one run, whose parts are kept beside it."""
    if not cores_of_a_device():
        raise CannotMeasure(f"{DEVICES} devices need as many cores, there are {available_cores()}")
    steps = QUICK_STEPS
    first = [times(row.run(steps, extent.data_flags)) for row in ROWS.values()]
    if not extent.quick:
        slowest = max(run.whole for run in first)
        steps = max(QUICK_STEPS, round(1000 * extent.seconds / slowest))
    runs: dict[str, list[Times]] = {name: [] for name in ROWS}

    def sample(name: str) -> float:
        runs[name].append(times(ROWS[name].run(steps, extent.data_flags)))
        return runs[name][-1].whole

    measure({name: partial(sample, name) for name in ROWS}, extent.rounds)
    return record(runs, steps)


def record(runs: dict[str, list[Times]], steps: int) -> dict:
    """The group of these runs, with the ratio of each level's step to that of the level it is explained by."""
    samples = {name: [run.whole for run in own] for name, own in runs.items()}
    facts = {name: _facts(ROWS[name], steps, own) for name, own in runs.items()}
    compared = [(of.name, to.name) for of, to in COMPARED]
    return records.group(TITLE, "ms", samples, facts, compared)


def _facts(row: Row, steps: int, runs: list[Times]) -> dict:
    """A row's facts beside the whole: the median and the samples of each part, and their sum as a share of it."""
    parts = {}
    for part in PARTS:
        samples = [records.rounded(run.parts[part]) for run in runs]
        parts[part] = {"median": records.rounded(statistics.median(samples)), "samples": samples}
    sums = [sum(run.parts.values()) for run in runs]
    wholes = [run.whole for run in runs]
    return {
        "level": row.level,
        "devices": row.devices,
        "short": row.short,
        "global_batch_size": row.batch_size,
        "steps": steps,
        "cores_per_device": cores_of_a_device(),
        "parts": parts,
        "sum_of_whole": records.rounded(statistics.median(ratios(sums, wholes))),
    }
