"""Steady-state throughput of the levels: their own train.py, called again and again in processes that stay.

A configuration is a level, a number of processes and a global batch. Its processes are started once and import the
level once; a sample is one call of the unmodified `train(args)` for some steps, of which the first few are not counted,
and the slowest rank's images per second. Processes of one run share the cores: each has as many threads as cores there
are, divided by the number of processes.
"""

import statistics
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import proof, records
from benchmarks.paired import Samples
from benchmarks.workers import ranks
from common import ladder, report
from common.accelerator.state import available_cores

# Fewer than a user's run has: the processes are warm from their first, uncounted run.
WARM_UP_STEPS = 3
TIMEOUT = 900  # seconds, for any one call
REPLICATED = "01_data_parallel"
LEAST = {"03_accelerate": 0.98, "04_trainer": 0.97}  # of level 02's throughput
WORTH_IT = 1.1  # of one process's throughput: where two reach less, the record says why


@dataclass(frozen=True)
class Configuration:
    """What one row measures.

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
        if self.level == "00_single_gpu":
            return self.level + (f", {self.batch_size} on {self.threads} of the cores" if self.threads else "")
        kind = ("replica" if self.workers == 1 else "replicas") if self.level == REPLICATED else "process"
        return f"{self.level}, {self.workers} {kind}{'es' if kind == 'process' and self.workers > 1 else ''}"

    @property
    def processes(self) -> int:
        return self.workers if self.level in ladder.DISTRIBUTED else 1

    def run(self, steps: int, flags: tuple[str, ...] = ()) -> dict:
        """Train for so many steps after the warm-up; the slowest rank's result, and "threads" of each process.

        `flags` are the level's own, such as --dataset. RankFailed is raised if a rank fails.
        """
        argv = ["--batch-size", str(self.batch_size), "--max-steps", str(WARM_UP_STEPS + steps)]
        argv += ["--eval-samples", str(self.workers), *flags]
        argv += ["--replicas", str(self.workers)] if self.level == REPLICATED else []
        threads = self.threads or max(1, available_cores() // self.processes)
        pool = ranks(self.processes)
        results = pool.run(train, self.level, tuple(argv), threads, self.path, timeout=TIMEOUT)
        return min(results, key=lambda result: result["images_per_sec"])


def train(level: str, argv: tuple[str, ...], threads: int, path: Path | None = None) -> dict:
    """In one of the processes: the result of the level after a short warm-up, and the number of threads it used."""
    report.WARM_UP_STEPS = WARM_UP_STEPS
    return proof.train(level, argv, threads, path) | {"threads": torch.get_num_threads()}


class Throughput:
    """Configurations to be measured in turns: `contestants` for `benchmarks.paired`, and what is known of each.

    Making one starts the processes and runs every configuration once, uncounted, which also tells how many steps take
    about `seconds` here: the same number for all, so that each does the same work per image.
    """

    def __init__(self, configurations: list[Configuration], seconds: float, flags: tuple[str, ...] = ()) -> None:
        self.configurations = {configuration.name: configuration for configuration in configurations}
        first = {name: configuration.run(2, flags) for name, configuration in self.configurations.items()}
        step = statistics.median(result["global_batch_size"] / result["images_per_sec"] for result in first.values())
        largest = max(configuration.batch_size for configuration in configurations)
        self.steps = max(2, min(round(seconds / step), 400, 60_000 // largest - WARM_UP_STEPS))
        self.facts = {name: self._facts(name, result) for name, result in first.items()}
        self.contestants = {
            name: lambda configuration=configuration: configuration.run(self.steps, flags)["images_per_sec"]
            for name, configuration in self.configurations.items()
        }

    def _facts(self, name: str, result: dict) -> dict:
        configuration = self.configurations[name]
        return {
            "level": configuration.level,
            "workers": configuration.workers,
            "processes": configuration.processes,
            "threads_per_process": result["threads"],
            "global_batch_size": configuration.batch_size,
            "steps": self.steps,
            "device": result["device"],
            "backend": result["backend"],
            "dataset": result["dataset"],
        }


def world_sizes() -> list[int]:
    """1, 2, and every number of GPUs that there is."""
    return sorted({1, 2, *range(1, torch.cuda.device_count() + 1)})


def strong_scaling(batch_size: int) -> list[Configuration]:
    """All levels at one global batch, whatever the number of workers; and one of two ranks' share of it, alone."""
    sizes = [size for size in world_sizes() if batch_size % size == 0]
    share = Configuration("00_single_gpu", 1, batch_size // 2, max(1, available_cores() // 2))
    return [*_levels({size: batch_size for size in sizes}), share]


def weak_scaling(batch_per_worker: int) -> list[Configuration]:
    """All levels, each worker with a batch of its own: the global batch grows with their number."""
    return _levels({size: size * batch_per_worker for size in world_sizes()})


def _levels(batch_sizes: dict[int, int]) -> list[Configuration]:
    """Every level at the global batch of each number of workers; level 00 has one."""
    return [
        Configuration(level, workers, batch_size)
        for level in ladder.levels()
        for workers, batch_size in batch_sizes.items()
        if workers == 1 or level != "00_single_gpu"
    ]


def named(level: str, workers: int) -> str:
    return Configuration(level, workers).name


def strong_scaling_record(batch_size: int, samples: Samples, facts: dict[str, dict]) -> dict:
    """With the ratio of two processes, half of the cores each, to one process with all of them."""
    two, one, ddp_of_one = named("02_ddp_raw", 2), "00_single_gpu", named("02_ddp_raw", 1)
    ratios = [(two, one), (two, ddp_of_one), (ddp_of_one, one), (named(REPLICATED, 2), two)]
    record = records.group(
        f"strong scaling: global batch {batch_size}, shared by all workers", "images/s", samples, facts, ratios
    )
    record["notes"] = [*environment(facts), *why_no_faster(record)]
    return record


def weak_scaling_record(batch_per_worker: int, samples: Samples, facts: dict[str, dict]) -> dict:
    """With what levels 03 and 04 reach of level 02, and what several processes reach of one."""
    sizes = sorted({row["workers"] for row in facts.values()})
    ratios = [(named(level, size), named("02_ddp_raw", size)) for level in ladder.DISTRIBUTED[1:] for size in sizes]
    ratios += [(named(level, size), named(level, 1)) for level in ladder.DISTRIBUTED for size in sizes if size > 1]
    title = f"weak scaling: batch {batch_per_worker} for each worker"
    record = records.group(title, "images/s", samples, facts, ratios)
    record["notes"] = [*environment(facts), *promises(record)]
    return record


def environment(facts: dict[str, dict]) -> list[str]:
    """What the rows of a group have in common."""
    threads = {
        row["processes"]: row["threads_per_process"] for row in facts.values() if row["level"] != "00_single_gpu"
    }
    shares = ", ".join(f"{count} × {share}" for count, share in sorted(threads.items()))
    row = next(iter(facts.values()))
    backends = ", ".join(sorted({row["backend"] for row in facts.values() if row["backend"]}))
    return [f"{row['dataset']} on {row['device']}: {backends}.", f"{row['steps']} steps; processes × threads {shares}."]


def promises(record: dict) -> list[str]:
    """A line for each level with what it reaches of level 02 at the same number of processes, and what it should."""
    lines = []
    for pair in record["pairs"]:
        level, size = record["rows"][pair["of"]]["level"], record["rows"][pair["of"]]["workers"]
        if level in LEAST and pair["to"] == named("02_ddp_raw", size):
            verdict = "kept" if pair["median"] >= LEAST[level] else "MISSED"
            lines.append(f"{verdict}: {pair['of']}: {pair['median']:.3f} of level 02, at least {LEAST[level]}")
    return lines


def why_no_faster(record: dict) -> list[str]:
    """Where the time of two processes' step goes, if they reach less than WORTH_IT of one.

    All of it measured in the same rounds: the step of one process, the step of two, and what one of the two has to
    compute, alone on the machine with its half of the cores.
    """
    rows = record["rows"]
    names = (named("02_ddp_raw", 2), "00_single_gpu")
    two, one = (rows[name] for name in names)
    share = next(row for name, row in rows.items() if "of the cores" in name)
    ratio = next(pair["median"] for pair in record["pairs"] if (pair["of"], pair["to"]) == names)
    if ratio >= WORTH_IT:
        return []
    whole, half, both = (1000 * row["global_batch_size"] / row["median"] for row in (one, share, two))
    return [
        f"Why two processes reach {ratio:.2f} of one: one alone takes {whole:.1f} ms for a step with all cores. A "
        f"rank's half of the batch takes {half:.1f} ms with half of the cores: without meeting each other the two "
        f"would reach {whole / half:.2f}. Averaging gradients and sharing the memory makes their step {both:.1f} ms."
    ]
