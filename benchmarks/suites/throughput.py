"""Steady-state throughput of the levels: their own train.py, called again and again in processes that stay.

A configuration is a level, a number of processes and a global batch. Its processes are started once and import the
level once; a sample is one call of the unmodified `train(args)` for some steps, of which the first few are not counted,
and the slowest rank's images per second. Processes of one run share the cores: each has as many threads as cores there
are, divided by the number of processes.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.harness import page_faults, proof, records
from benchmarks.harness.groups import Extent, Group
from benchmarks.harness.paired import FEWEST_ROUNDS, Samples, differences, measure, summarise
from benchmarks.harness.process_facts import process_facts
from common import ladder
from common.cores import available_cores
from common.processes import ranks

# Fewer than a user's run has: the processes are warm from their first, uncounted run.
WARM_UP_STEPS = 3
# On a GPU, whose clocks need so long to settle, a sample is preceded by steps that take this time.
WARM_UP_SECONDS = 0.5
QUICK_STEPS = 2
TIMEOUT = 900  # seconds, for any one call
FIRST = "00_single_gpu"
REPLICATED = "01_data_parallel"
RAW_DDP = "02_ddp_raw"
LEAST = {"03_accelerate": 0.98, "04_trainer": 0.97}  # of level 02's throughput
WORTH_IT = 1.1  # of one process's throughput: where two reach less, the record says why


@dataclass(frozen=True)
class Configuration:
    """A level as one row measures it.

    Attributes:
        workers: processes, or at level 01 replicas.
        batch_size: the global batch.
        threads: of each process; by default its fair share of the cores.
        path: of another version of the level, in a folder of the level's name.
    """

    level: str
    workers: int = 1
    batch_size: int = 64
    threads: int | None = None
    path: Path | None = None

    @property
    def name(self) -> str:
        if self.level != FIRST:
            return f"{self.level}, {self.workers} {self._kind_of_worker()}"
        if self.threads:
            return f"{self.level}, {self.batch_size} on {self.threads} of the cores"
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
        threads = self.threads or max(1, available_cores() // self.processes)
        pool = ranks(self.processes)
        results = pool.run(train, self.level, tuple(argv), threads, self.path, warm_up, timeout=TIMEOUT)
        return min(results, key=lambda result: result["images_per_sec"])


def train(
    level: str, argv: tuple[str, ...], threads: int, path: Path | None = None, warm_up: int = WARM_UP_STEPS
) -> dict:
    """In one of the processes: the result of the level after a short warm-up, and what else its row tells.

    That is its "minor_faults_per_step", and how the process is set: see `process_facts`.
    """
    flags = (*argv, "--warm-up-steps", str(warm_up))
    with page_faults.counting() as counter:
        result = proof.train(level, flags, threads, path)
    return result | process_facts() | {"minor_faults_per_step": counter.after(warm_up)}


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
            "processes": configuration.processes,
            "threads_per_process": result["threads_per_process"],
            "global_batch_size": configuration.batch_size,
            "steps": self.steps,
            "device": result["device"],
            "backend": result["backend"],
            "dataset": result["dataset"],
            "minor_faults_per_step": result["minor_faults_per_step"],
            "allocator": result["allocator"],
            "pinned_to_cores": result["pinned_to_cores"],
        }


def world_sizes() -> list[int]:
    """1, 2, and every number of GPUs that there is."""
    return sorted({1, 2, *range(1, torch.cuda.device_count() + 1)})


def strong_scaling(batch_size: int) -> list[Configuration]:
    """All levels at one global batch, whatever the number of workers.

    On a CPU also one of two ranks' share of it, alone with half of the cores. On GPUs the ranks do not compute there.
    """
    sizes = [size for size in world_sizes() if batch_size % size == 0]
    configurations = _levels({size: batch_size for size in sizes})
    if not torch.cuda.is_available():
        half_of_the_cores = max(1, available_cores() // 2)
        configurations.append(Configuration(FIRST, 1, batch_size // 2, half_of_the_cores))
    return configurations


def weak_scaling(batch_per_worker: int) -> list[Configuration]:
    """All levels, each worker with a batch of its own: the global batch grows with their number."""
    return _levels({size: size * batch_per_worker for size in world_sizes()})


def _levels(batch_sizes: dict[int, int]) -> list[Configuration]:
    """Every level at the global batch of each number of workers; level 00 has one."""
    return [
        Configuration(level, workers, batch_size)
        for level in ladder.levels()
        for workers, batch_size in batch_sizes.items()
        if workers == 1 or level != FIRST
    ]


def named(level: str, workers: int) -> str:
    return Configuration(level, workers).name


STRONG_TITLE = "strong scaling: global batch {}, shared by all workers"
WEAK_TITLE = "weak scaling: batch {} for each worker"


def groups() -> list[Group]:
    """Strong scaling at two global batches, and weak scaling."""
    found = []
    for size in (64, 256):
        title = STRONG_TITLE.format(size)
        found.append(_group(f"strong-{size}", title, strong_scaling(size), partial(strong_scaling_record, size)))
    title = WEAK_TITLE.format(64)
    found.append(_group("weak-64", title, weak_scaling(64), partial(weak_scaling_record, 64)))
    return found


def _group(key: str, title: str, configurations: list[Configuration], make_record: Callable) -> Group:
    rows = tuple(configuration.name for configuration in configurations)

    def measured(selected: tuple[str, ...], extent: Extent) -> dict:
        own = [configuration for configuration in configurations if configuration.name in selected]
        timed = Throughput(own, extent.seconds, extent.data_flags, extent.quick)
        samples = measure(timed.contestants, extent.rounds)
        return make_record(samples, timed.facts)

    return Group(key, title, rows, measured)


def strong_scaling_record(batch_size: int, samples: Samples, facts: dict[str, dict]) -> dict:
    """With the ratio of two processes, half of the cores each, to one process with all of them."""
    one = FIRST
    ddp_of_one = named(RAW_DDP, 1)
    two = named(RAW_DDP, 2)
    ratios = [(two, one), (two, ddp_of_one), (ddp_of_one, one), (named(REPLICATED, 2), two)]
    record = records.group(STRONG_TITLE.format(batch_size), "images/s", samples, facts, ratios)
    record["notes"] = what_was_run(record, facts) + why_no_faster(record)
    return record


def weak_scaling_record(batch_per_worker: int, samples: Samples, facts: dict[str, dict]) -> dict:
    """With what levels 03 and 04 reach of level 02, and what several processes reach of one."""
    sizes = sorted({row["workers"] for row in facts.values()})
    ratios = []
    for level in ladder.DISTRIBUTED[1:]:
        ratios += [(named(level, size), named(RAW_DDP, size)) for size in sizes]
    for level in ladder.DISTRIBUTED:
        ratios += [(named(level, size), named(level, 1)) for size in sizes if size > 1]
    record = records.group(WEAK_TITLE.format(batch_per_worker), "images/s", samples, facts, ratios)
    record["notes"] = what_was_run(record, facts) + promises(record)
    return record


def what_was_run(record: dict, facts: dict[str, dict]) -> list[str]:
    """The notes of every group: what its rows have in common, and which of them spent time in the kernel."""
    return environment(facts) + page_faults.remarks(record["rows"])


def environment(facts: dict[str, dict]) -> list[str]:
    """Lines on what the rows of a group have in common."""
    threads = {row["processes"]: row["threads_per_process"] for row in facts.values() if row["level"] != FIRST}
    shares = [f"{count} × {share}" for count, share in sorted(threads.items())]
    backends = {row["backend"] for row in facts.values() if row["backend"]}
    row = next(iter(facts.values()))
    return [
        f"{row['dataset']} on {row['device']}: {', '.join(sorted(backends))}.",
        f"{row['steps']} steps; processes × threads {', '.join(shares)}.",
    ]


def promises(record: dict) -> list[str]:
    """A line for each level with what it reaches of level 02 at the same number of processes, and what it should.

    A promise is kept where the interval of the ratio lies above it, and missed where it lies below. Where it holds the
    promise, or is of fewer rounds than FEWEST_ROUNDS, the promise is open: more rounds would have to decide. The time
    that the level adds to a step is there too, because the same time is a large share of a short step and a small share
    of a long one.
    """
    lines = []
    for pair in record["pairs"]:
        row = record["rows"][pair["of"]]
        level = row["level"]
        if level in LEAST and pair["to"] == named(RAW_DDP, row["workers"]):
            low, high = pair["interval"]
            verdict = _verdict(low, high, LEAST[level], record["rounds"])
            reached = f"{pair['median']:.3f} ({low:.3f} to {high:.3f})"
            added = _microseconds_added(row, record["rows"][pair["to"]])
            lines.append(
                f"{verdict}: {pair['of']}: {reached} of level 02, {LEAST[level]} asked; {added:+.0f} µs a step"
            )
    return lines


def _microseconds_added(row: dict, to: dict) -> float:
    """The time by which a step of `row` is longer than one of `to`: the median over the rounds."""
    batch = row["global_batch_size"]
    ours = [batch / rate for rate in row["samples"]]
    theirs = [batch / rate for rate in to["samples"]]
    return 1e6 * summarise(differences(ours, theirs)).median


def _verdict(low: float, high: float, least: float, rounds: int) -> str:
    """Of an interval, what it should not be below, and how many rounds the interval is of."""
    if rounds < FEWEST_ROUNDS:
        return "open, too few rounds"
    if low >= least:
        return "kept"
    return "MISSED" if high < least else "open"


def why_no_faster(record: dict) -> list[str]:
    """An account of the time of two processes' step, if they reach less than WORTH_IT of one.

    All of it measured in the same rounds: the step of one process, the step of two, and what one of the two has to
    compute, alone on the machine with its half of the cores. There is no reason where one of the three is missing, or
    was not computed by the CPU.
    """
    rows = record["rows"]
    if any(row["device"] != "cpu" for row in rows.values()):
        return []
    compared = (named(RAW_DDP, 2), FIRST)
    ratios = [pair["median"] for pair in record["pairs"] if (pair["of"], pair["to"]) == compared]
    shares = [row for name, row in rows.items() if "of the cores" in name]
    if not ratios or not shares or ratios[0] >= WORTH_IT:
        return []
    (ratio,) = ratios
    (share,) = shares
    whole = _step_milliseconds(rows[FIRST])
    half = _step_milliseconds(share)
    both = _step_milliseconds(rows[named(RAW_DDP, 2)])
    return [
        f"Why two processes reach {ratio:.2f} of one: one alone takes {whole:.1f} ms for a step with all cores. A "
        f"rank's half of the batch takes {half:.1f} ms with half of the cores: without meeting each other the two "
        f"would reach {whole / half:.2f}. Averaging gradients and sharing the memory makes their step {both:.1f} ms."
    ]


def _step_milliseconds(row: dict) -> float:
    return 1000 * row["global_batch_size"] / row["median"]


if __name__ == "__main__":
    raise SystemExit("error: a suite is run by: pytest benchmarks -k test_throughput")
