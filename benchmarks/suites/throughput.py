"""Steady-state throughput of the levels: their own train.py, called again and again in processes that stay.

A configuration is a level, a number of processes and a global batch. Its processes are started once and import the
level once; a sample is one call of the unmodified `train(args)` for some steps, of which the first few are not counted,
and the slowest rank's images per second.

Without GPUs a device is an equal part of the cores: see `common.cores`. Level 00 has one device, as it would have one
GPU; several processes or replicas have one each. What one process does with all cores is a row apart, because only a
CPU offers this choice.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.harness import proof, records
from benchmarks.harness.groups import CannotMeasure, Extent, Group
from benchmarks.harness.paired import Samples, measure
from common import ladder
from common.cores import available_cores
from common.instruments.result import quantity
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
FIRST = "00_single_gpu"
REPLICATED = "01_data_parallel"
RAW_DDP = "02_ddp_raw"
ALL_CORES = "all cores"


@dataclass(frozen=True)
class Configuration:
    """A level as one row measures it.

    Attributes:
        workers: processes, or at level 01 replicas.
        batch_size: the global batch.
        cores_per_device: of a device that is a part of the cores; by default the workers share all of them.
        path: of another version of the level, in a folder of the level's name.
        apart: what tells a row of level 00 from that of the whole batch on one device.
    """

    level: str
    workers: int = 1
    batch_size: int = 64
    cores_per_device: int | None = None
    path: Path | None = None
    apart: str = ""

    @property
    def name(self) -> str:
        if self.level != FIRST:
            return f"{self.level}, {self.workers} {self._kind_of_worker()}"
        if self.apart:
            return f"{self.level}, {self.apart}"
        return self.level

    def _kind_of_worker(self) -> str:
        if self.level == REPLICATED:
            return "replica" if self.workers == 1 else "replicas"
        return "process" if self.workers == 1 else "processes"

    @property
    def processes(self) -> int:
        return self.workers if self.level in ladder.DISTRIBUTED else 1

    def run(self, steps: int, flags: tuple[str, ...] = (), warm_up: int = WARM_UP_STEPS) -> dict:
        """Train for so many steps after the warm-up; the slowest rank's result, with what `train` adds to it.

        `flags` are the level's own, such as --dataset. RankFailed is raised if a rank fails.
        """
        argv = ["--batch-size", str(self.batch_size), "--max-steps", str(warm_up + steps)]
        argv += ["--eval-samples", str(self.workers), *flags]
        if self.level == REPLICATED:
            argv += ["--replicas", str(self.workers)]
        threads = max(1, available_cores() // self.processes)
        if self.cores_per_device:
            threads = self.cores_per_device
            argv += ["--cores-per-device", str(threads)]
        pool = ranks(self.processes)
        results = pool.run(train, self.level, tuple(argv), threads, self.path, warm_up, timeout=TIMEOUT)
        return min(results, key=lambda result: result["images_per_sec"])


def train(
    level: str, argv: tuple[str, ...], threads: int, path: Path | None = None, warm_up: int = WARM_UP_STEPS
) -> dict:
    """In one of the processes: the result of the level after a short warm-up."""
    return proof.train(level, (*argv, "--warm-up-steps", str(warm_up)), threads, path)


class Throughput:
    """Configurations to be measured in turns: `contestants` for `benchmarks.harness.paired`, and what is known of each.

    Making one starts the processes and runs every configuration once, uncounted, which also tells how many steps take
    about `seconds` here: the same number for all, so that each does the same work per image. With `quick` there is no
    such run: a sample is QUICK_STEPS steps after a single one of warm-up, which shows that everything runs.

    Attributes:
        facts: of each configuration that has run, what its row says beside the images per second.
    """

    def __init__(
        self,
        configurations: list[Configuration],
        seconds: float,
        flags: tuple[str, ...] = (),
        quick: bool = False,
    ) -> None:
        self.flags = flags
        self.warm_up = 1 if quick else WARM_UP_STEPS
        self.configurations = {configuration.name: configuration for configuration in configurations}
        self.facts: dict[str, dict] = {}
        self.steps = QUICK_STEPS
        if not quick:
            first = {name: configuration.run(2, flags) for name, configuration in self.configurations.items()}
            if any(result["device"] != "cpu" for result in first.values()):
                self.warm_up = self._steps_in(WARM_UP_SECONDS, list(first.values()))
                # By now its clocks have settled: only now the time of a step is the one that is measured.
                first = {
                    name: configuration.run(self.warm_up, flags, self.warm_up)
                    for name, configuration in self.configurations.items()
                }
                self.warm_up = self._steps_in(WARM_UP_SECONDS, list(first.values()))
            self.steps = self._steps_in(seconds, list(first.values()))
            self.facts = {name: self._facts(name, result) for name, result in first.items()}
        self.contestants = {name: partial(self._images_per_sec, name) for name in self.configurations}

    def _steps_in(self, seconds: float, results: list[dict]) -> int:
        """The number of steps that take about `seconds`: 2 at least; on a CPU 400 or an epoch's at most."""
        durations = [result["global_batch_size"] / result["images_per_sec"] for result in results]
        largest = max(configuration.batch_size for configuration in self.configurations.values())
        of_an_epoch = 60_000 // largest - WARM_UP_STEPS
        wanted = round(seconds / statistics.median(durations))
        if any(result["device"] != "cpu" for result in results):
            return max(2, wanted)
        return max(2, min(wanted, 400, of_an_epoch))

    def _images_per_sec(self, name: str) -> float:
        result = self.configurations[name].run(self.steps, self.flags, self.warm_up)
        self.facts[name] = self._facts(name, result)
        return result["images_per_sec"]

    def _facts(self, name: str, result: dict) -> dict:
        configuration = self.configurations[name]
        return {
            "level": configuration.level,
            "workers": configuration.workers,
            "cores_per_device": configuration.cores_per_device,
            "apart": configuration.apart,
            "processes": configuration.processes,
            "global_batch_size": configuration.batch_size,
            "steps": self.steps,
            "device": result["device"],
            "backend": result["backend"],
            "dataset": result["dataset"],
        }


def world_sizes() -> list[int]:
    """1, 2, and every number of GPUs that there is."""
    return sorted({1, 2, *range(1, torch.cuda.device_count() + 1)})


def cores_of_a_device(devices: int) -> int | None:
    """The cores of each of so many devices; None where GPUs compute, or where there are fewer cores than devices."""
    if torch.cuda.is_available():
        return None
    return available_cores() // devices or None


def strong_scaling(batch_size: int) -> list[Configuration]:
    """All levels at one global batch, whatever the number of workers.

    Levels 01 to 04 on one worker are rows of the smallest of BATCH_SIZES only, where what they add to a step weighs
    most. Where devices are made of cores, also what explains the ratio of two to one: see `apart`.
    """
    sizes = [size for size in world_sizes() if batch_size % size == 0]
    rows = _levels({size: batch_size for size in sizes})
    if batch_size != min(BATCH_SIZES):
        rows = _on_several_devices(rows)
    return rows + apart(batch_size, 2)


def weak_scaling(batch_per_worker: int) -> list[Configuration]:
    """All levels, each worker with a batch of its own: the global batch grows with their number.

    One worker is level 00. The others on one worker would compute the same as in strong scaling.
    """
    configurations = _on_several_devices(_levels({size: size * batch_per_worker for size in world_sizes()}))
    return configurations + [row for row in apart(batch_per_worker, 2) if row.apart == ALL_CORES]


def _levels(batch_sizes: dict[int, int]) -> list[Configuration]:
    """Every level at the global batch of each number of workers; level 00 has one."""
    cores = cores_of_a_device(2)
    return [
        Configuration(level, workers, batch_size, cores)
        for level in ladder.levels()
        for workers, batch_size in batch_sizes.items()
        if workers == 1 or level != FIRST
    ]


def _on_several_devices(configurations: list[Configuration]) -> list[Configuration]:
    """Level 00 on one device, and the others on more than one."""
    return [row for row in configurations if row.level == FIRST or row.workers > 1]


def apart(batch_size: int, devices: int) -> list[Configuration]:
    """Two rows of level 00 that belong to no device of the comparison, where devices are made of cores.

    One has all cores. The other has one device for what each of several would compute, its share of the batch.
    """
    cores = cores_of_a_device(devices)
    if cores is None or devices == 1:
        return []
    share = batch_size // devices
    return [
        Configuration(FIRST, 1, batch_size, apart=ALL_CORES),
        Configuration(FIRST, 1, share, cores, apart=f"a share of {share}"),
    ]


def named(level: str, workers: int) -> str:
    return Configuration(level, workers).name


STRONG_TITLE = "strong scaling: global batch {}, shared by all workers"
WEAK_TITLE = "weak scaling: batch {} for each worker"


def groups() -> list[Group]:
    """Strong and weak scaling, each at two batches."""
    found = []
    for size in BATCH_SIZES:
        title = STRONG_TITLE.format(size)
        make_record = partial(strong_scaling_record, size)
        found.append(_group(f"strong-{size}", title, size, strong_scaling(size), make_record))
    for size in BATCH_SIZES:
        title = WEAK_TITLE.format(size)
        make_record = partial(weak_scaling_record, size)
        found.append(_group(f"weak-{size}", title, size, weak_scaling(size), make_record))
    return found


def _group(key: str, title: str, size: int, configurations: list[Configuration], make_record: Callable) -> Group:
    rows = tuple(configuration.name for configuration in configurations)

    def measured(selected: tuple[str, ...], extent: Extent) -> dict:
        if extent.quick and size != QUICK_BATCH:
            raise CannotMeasure(f"--quick measures batches of {QUICK_BATCH} only")
        own = [configuration for configuration in configurations if configuration.name in selected]
        timed = Throughput(own, SECONDS, extent.data_flags, extent.quick)
        samples = measure(timed.contestants, extent.rounds)
        return make_record(samples, timed.facts)

    return Group(key, title, rows, measured)


def strong_scaling_record(batch_size: int, samples: Samples, facts: dict[str, dict]) -> dict:
    """With what every row reaches of level 00 on one device, and levels 03 and 04 of level 02."""
    two = named(RAW_DDP, 2)
    ratios = to_level_00(facts) + to_level_02(facts)
    ratios += [(two, named(RAW_DDP, 1)), (named(REPLICATED, 2), two)]
    record = records.group(STRONG_TITLE.format(batch_size), "images/s", samples, facts, ratios)
    record["notes"] = environment(facts) + where_time_goes(record)
    return record


def weak_scaling_record(batch_per_worker: int, samples: Samples, facts: dict[str, dict]) -> dict:
    """With the same."""
    ratios = to_level_00(facts) + to_level_02(facts)
    record = records.group(WEAK_TITLE.format(batch_per_worker), "images/s", samples, facts, ratios)
    record["notes"] = environment(facts)
    return record


def to_level_00(facts: dict[str, dict]) -> list[tuple[str, str]]:
    """Every row that does the work of level 00, and level 00 on one device; by level, then by workers."""

    def place(name: str) -> tuple[bool, str, int]:
        row = facts[name]
        return row["apart"] == ALL_CORES, row["level"], row["workers"]

    others = [name for name, row in facts.items() if name != FIRST and row["apart"] in ("", ALL_CORES)]
    return [(name, FIRST) for name in sorted(others, key=place)]


def to_level_02(facts: dict[str, dict]) -> list[tuple[str, str]]:
    """Levels 03 and 04, and level 02 on as many processes."""
    pairs = []
    for level in ladder.DISTRIBUTED[1:]:
        pairs += [(named(level, size), named(RAW_DDP, size)) for size in _world_sizes_of(facts)]
    return pairs


def _world_sizes_of(facts: dict[str, dict]) -> list[int]:
    return sorted({row["workers"] for row in facts.values()})


def environment(facts: dict[str, dict]) -> list[str]:
    """Lines on what the rows of a group have in common."""
    backends = {row["backend"] for row in facts.values() if row["backend"]}
    row = next(iter(facts.values()))
    return [
        f"{row['dataset']} on {row['device']}: {', '.join(sorted(backends))}. {row['steps']} steps a sample.",
        *of_devices(facts),
    ]


def of_devices(rows: dict[str, dict]) -> list[str]:
    """A line on the cores of a device, where devices are made of cores."""
    sizes = {row.get("cores_per_device") for row in rows.values()} - {None}  # records of before do not say it
    lines = [f"A device has {quantity(size, 'core')}, and as many threads." for size in sorted(sizes)]
    return lines


def where_time_goes(record: dict) -> list[str]:
    """A line on a step of level 02 on several devices: what a device computes, and what meeting the others adds.

    All of it is measured in the same rounds: the step of one device, that of level 02 on several, and what one of the
    several has to compute, alone on its device. There is no line where one of the three is missing.
    """
    rows = record["rows"]
    shares = [row for row in rows.values() if row.get("apart", "").startswith("a share")]
    of_level_02 = [row for row in rows.values() if row["level"] == RAW_DDP and row.get("workers", 1) > 1]
    if not shares or not of_level_02 or FIRST not in rows:
        return []
    (share,) = shares
    (ddp,) = of_level_02
    n = ddp["workers"]
    whole = _step_milliseconds(rows[FIRST])
    part = _step_milliseconds(share)
    both = _step_milliseconds(ddp)
    return [
        f"A step at global batch {ddp['global_batch_size']}: {whole:.1f} ms on one device; on {n} {both:.1f} ms, of "
        f"which {part:.1f} compute a device's share and {both - part:.1f} average gradients and share the memory."
    ]


def _step_milliseconds(row: dict) -> float:
    return 1000 * row["global_batch_size"] / row["median"]


if __name__ == "__main__":
    raise SystemExit("error: a suite is run by: pytest benchmarks -k test_throughput")
