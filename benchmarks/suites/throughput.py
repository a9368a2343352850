"""Steady-state throughput of the levels: their own train.py, called again and again in processes that stay.

A configuration is a level, a number of processes and a global batch. Its processes are started once and import the
level once; a sample is one call of the unmodified `train(args)` for some steps, of which the first few are not counted,
and the slowest rank's images per second.

Without GPUs a device is an equal part of the cores: see `common.cores`. Level 00 has one device, as it would have one
GPU; several processes or replicas have one each. What one process does with all cores is a row apart, because only a
CPU offers this choice.
"""

import statistics
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.harness import level_runs, records
from benchmarks.harness.groups import CannotMeasure, Extent, Group
from benchmarks.harness.paired import Samples, measure
from benchmarks.harness.rows import ALL_CORES, BASELINE, RAW_DDP
from common import ladder
from common.cores import available_cores
from common.data.synthetic import SIZES
from common.processes import ranks

# Fewer than a user's run has: the processes are warm from their first, uncounted run. DDP has its final buckets from
# the second step on.
WARM_UP_STEPS = 2
# Of training in a sample. What makes an interval narrow is more rounds, not longer samples.
SECONDS = 0.5
# On a GPU, whose clocks need so long to settle, a sample is preceded by steps that take this time.
WARM_UP_SECONDS = 0.5
QUICK_STEPS = 2
TIMEOUT = 900  # seconds, for any one call
BATCH_SIZES = (64, 256)
QUICK_BATCH = 64  # the one that --quick measures
REPLICATED = "01_data_parallel"


@dataclass(frozen=True)
class Configuration:
    """A level as one row measures it.

    Attributes:
        workers: processes, or at level 01 replicas.
        batch_size: the global batch.
        cores_per_device: of a device that is a part of the cores; by default the workers share all of them.
        apart: what tells a row of level 00 from that of the whole batch on one device.
    """

    level: str
    workers: int = 1
    batch_size: int = 64
    cores_per_device: int | None = None
    apart: str = ""

    @property
    def name(self) -> str:
        if self.level == BASELINE:
            return f"{BASELINE}, {self.apart}" if self.apart else BASELINE
        if self.level == REPLICATED:
            return f"{self.level}, {self.workers} {'replica' if self.workers == 1 else 'replicas'}"
        return f"{self.level}, {self.workers} {'process' if self.workers == 1 else 'processes'}"

    @property
    def processes(self) -> int:
        return self.workers if self.level in ladder.DISTRIBUTED else 1

    @property
    def threads(self) -> int:
        """The threads of each process: one for each core that it may use."""
        return self.cores_per_device or max(1, available_cores() // self.processes)

    def argv(self, steps: int) -> list[str]:
        """The level's flags, but for those of the data, for so many steps."""
        argv = ["--batch-size", str(self.batch_size), "--max-steps", str(steps), "--eval-samples", str(self.workers)]
        if self.level == REPLICATED:
            argv += ["--replicas", str(self.workers)]
        if self.cores_per_device:
            argv += ["--cores-per-device", str(self.cores_per_device)]
        return argv

    def run(self, steps: int, flags: tuple[str, ...] = (), warm_up: int = WARM_UP_STEPS) -> dict:
        """Train for so many steps after the warm-up; the slowest rank's result.

        Args:
            flags: the level's own, such as --dataset.

        Raises:
            RankFailed: if a rank fails.
        """
        argv = [*self.argv(warm_up + steps), *flags]
        results = ranks(self.processes).run(train, self.level, argv, self.threads, warm_up, timeout=TIMEOUT)
        return min(results, key=lambda result: result["images_per_sec"])


def train(level: str, argv: list[str], threads: int, warm_up: int = WARM_UP_STEPS) -> dict:
    """In one of the processes: the result of the level after a short warm-up."""
    return level_runs.train(level, [*argv, "--warm-up-steps", str(warm_up)], threads)


class Throughput:
    """Configurations to be measured in turns: `contestants` for `benchmarks.harness.paired`, and what is known of each.

    Until `calibrate` a sample is QUICK_STEPS steps after a single one of warm-up, which shows that everything runs.

    Attributes:
        facts: of each configuration that has run, what its row says beside the images per second.
    """

    def __init__(self, configurations: list[Configuration], flags: tuple[str, ...] = ()) -> None:
        self.flags = flags
        self.warm_up = 1
        self.steps = QUICK_STEPS
        self.configurations = {configuration.name: configuration for configuration in configurations}
        self.facts: dict[str, dict] = {}
        self.contestants = {name: partial(self._images_per_sec, name) for name in self.configurations}

    def calibrate(self) -> None:
        """Run every configuration once, uncounted, and find how many steps take about SECONDS here.

        It is the same number for all, so that each does the same work per image.
        """
        self.warm_up = WARM_UP_STEPS
        self.steps = 2
        speeds = self._all_speeds()
        if any(row["device"] != "cpu" for row in self.facts.values()):
            self.warm_up = self.steps = self._steps_in(WARM_UP_SECONDS, speeds)
            # By now its clocks have settled: only now the time of a step is the one that is measured.
            speeds = self._all_speeds()
            self.warm_up = self._steps_in(WARM_UP_SECONDS, speeds)
        self.steps = self._steps_in(SECONDS, speeds)

    def _all_speeds(self) -> dict[str, float]:
        return {name: contestant() for name, contestant in self.contestants.items()}

    def _steps_in(self, seconds: float, speeds: dict[str, float]) -> int:
        """The number of steps that take about `seconds`: 2 at least, and with the warm-up an epoch's at most."""
        durations = [self.configurations[name].batch_size / speed for name, speed in speeds.items()]
        wanted = max(2, round(seconds / statistics.median(durations)))
        largest = max(configuration.batch_size for configuration in self.configurations.values())
        in_an_epoch = SIZES["train"] // largest
        if any(row["device"] != "cpu" for row in self.facts.values()):
            return min(wanted, in_an_epoch // 2)  # the warm-up takes as many
        return min(wanted, 400, in_an_epoch - WARM_UP_STEPS)

    def _images_per_sec(self, name: str) -> float:
        configuration = self.configurations[name]
        result = configuration.run(self.steps, self.flags, self.warm_up)
        self.facts[name] = {
            "level": configuration.level,
            "workers": configuration.workers,
            "cores_per_device": configuration.cores_per_device,
            "apart": configuration.apart,
            "global_batch_size": configuration.batch_size,
            "steps": self.steps,
            "device": result["device"],
            "backend": result["backend"],
            "dataset": result["dataset"],
        }
        return result["images_per_sec"]


def world_sizes() -> list[int]:
    """Every number of GPUs that there is; without GPUs 1 and 2."""
    return [*range(1, torch.cuda.device_count() + 1)] or [1, 2]


def cores_of_a_device(devices: int) -> int | None:
    """The cores of each of so many devices; None where GPUs compute, or where there are fewer cores than devices."""
    if torch.cuda.is_available():
        return None
    return available_cores() // devices or None


def strong_scaling(batch_size: int) -> list[Configuration]:
    """All levels at one global batch, whatever the number of workers."""
    sizes = [size for size in world_sizes() if batch_size % size == 0]
    return _levels({size: batch_size for size in sizes}) + all_cores(batch_size)


def weak_scaling(batch_per_worker: int) -> list[Configuration]:
    """All levels, each worker with a batch of its own: the global batch grows with their number."""
    return _levels({size: size * batch_per_worker for size in world_sizes()}) + all_cores(batch_per_worker)


def _levels(batch_sizes: dict[int, int]) -> list[Configuration]:
    """Level 00 on one device, and the others on several, at the global batch of each number of workers."""
    cores = cores_of_a_device(2)
    rows = []
    for level in ladder.levels():
        for workers, batch_size in batch_sizes.items():
            if (workers == 1) == (level == BASELINE):
                rows.append(Configuration(level, workers, batch_size, cores))
    return rows


def all_cores(batch_size: int) -> list[Configuration]:
    """Level 00 with all cores, where devices are made of cores."""
    if torch.cuda.is_available():
        return []
    return [Configuration(BASELINE, 1, batch_size, apart=ALL_CORES)]


def groups() -> list[Group]:
    """Strong and weak scaling, each at two batches."""
    found = []
    for key, title, rows_of in (
        ("strong", "strong scaling: global batch {}, shared by all workers", strong_scaling),
        ("weak", "weak scaling: batch {} for each worker", weak_scaling),
    ):
        for size in BATCH_SIZES:
            rows = rows_of(size)
            names = tuple(row.name for row in rows)
            measure_rows = partial(_measured, title.format(size), rows, size)
            found.append(Group(f"{key}-{size}", title.format(size), names, measure_rows))
    return found


def _measured(title: str, rows: list[Configuration], size: int, extent: Extent) -> dict:
    if extent.quick and size != QUICK_BATCH:
        raise CannotMeasure(f"--quick measures batches of {QUICK_BATCH} only")
    timed = Throughput(rows, extent.data_flags)
    if not extent.quick:
        timed.calibrate()
    return record(title, measure(timed.contestants, extent.rounds), timed.facts)


def record(title: str, samples: Samples, facts: dict[str, dict]) -> dict:
    """With what rows reach of level 00 on one device, and levels 03 and 04 of level 02 on as many."""
    ratios = [(name, BASELINE) for name in samples if name != BASELINE]
    for level in ladder.DISTRIBUTED[1:]:
        for workers in sorted({row["workers"] for row in facts.values()}):
            ratios.append((Configuration(level, workers).name, Configuration(RAW_DDP, workers).name))
    return records.group(title, "images/s", samples, facts, ratios)
