"""All levels side by side: the same work at each, timed in turn, against the three promises of the ladder.

python -m benchmarks.compare
python -m benchmarks.compare --full
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.harness import level_runs, machine, records
from benchmarks.harness.options import BATCH_SIZES, MeasureOptions
from benchmarks.harness.rows import BASELINE, DATA_PARALLEL, DDP
from benchmarks.report.comparison_table import summary, wrapped
from benchmarks.report.pictures import COMPARISON, draw
from benchmarks.report.verdicts import verdicts
from benchmarks.suites import memory, throughput
from common import ladder
from common.cores import available_cores
from common.data import provide
from common.data.synthetic import SIZES
from common.errors import fail
from common.flag_types import positive
from common.instruments.result import quantity
from common.processes import RankFailed
from common.weights import checksum, max_weight_difference

EXACT = ["--dtype", "float64", "--no-dropout"]
PROOF_STEPS = 10
EVALUATION_RANKS = 3  # Three do not divide 10,000 samples, so padding or dropping shows.
EVALUATION_BATCH = 63  # three ranks can share it
INCOMPLETE = "incomplete.json"


class Settings(NamedTuple):
    """The choices that all parts of a comparison share."""

    world_size: int  # processes, or replicas, that train and are timed; memory and proofs have two or more
    batch_sizes: tuple[int, ...]  # the global batches at which levels are timed; everything else is done at the first
    steps: int  # optimizer steps of each level's training
    rounds: int  # how often the levels take turns being timed
    data_flags: tuple[str, ...]  # the levels' flags that name the dataset
    full: bool  # account for the memory of all networks and wrappers


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__.splitlines()[0])
    flag = parser.add_argument
    flag("--full", action="store_true", help="an epoch of training, batch 256 too, all networks' memory")
    flag("--world-size", type=positive, metavar="N", help="processes, or replicas (default: one for each GPU, else 2)")
    flag("--steps", type=positive, metavar="N", help="optimizer steps of each level's run (60; --full: an epoch)")
    flag("--rounds", type=positive, metavar="N", help="how often the levels take turns being timed (4; --full: 10)")
    flag("--out", type=Path, default=Path("results"), metavar="PATH", help="folder for the results and the report")
    flag("--dataset", choices=["auto", "mnist", "synthetic"], default="auto")
    flag("--data-dir", default=os.environ.get("MNIST_ROOT", "data"), metavar="PATH", help="holds MNIST/raw")
    return parser.parse_args(argv)


def choose_settings(options: argparse.Namespace, dataset: str, gpus: int) -> Settings:
    """The settings on a machine with `gpus` GPUs: what the flags say, and else the defaults.

    Raises:
        UserError: if --world-size asks for more processes than there are GPUs, or --steps for more than an epoch.
    """
    world_size = options.world_size or gpus or 2
    if 0 < gpus < world_size:
        fail(f"--world-size {world_size}: this machine has {quantity(gpus, 'GPU')}")
    # The largest batches up to these sizes that all processes can share; at least a sample for each.
    sizes = BATCH_SIZES if options.full else BATCH_SIZES[:1]
    batch_sizes = tuple(max(size // world_size, 1) * world_size for size in sizes)
    epoch = SIZES["train"] // batch_sizes[0]
    if options.steps and options.steps > epoch:
        fail(f"--steps {options.steps}: an epoch has {epoch}")
    return Settings(
        world_size=world_size,
        batch_sizes=batch_sizes,
        steps=options.steps or (epoch if options.full else 60),
        rounds=options.rounds or (10 if options.full else 4),
        data_flags=("--dataset", dataset, "--data-dir", options.data_dir),
        full=options.full,
    )


@dataclass
class Report:
    """What a comparison has found so far, as results.json will hold it, with "ended" beside "began".

    Attributes:
        machine, began: as in the record of a suite, see `benchmarks.harness.records`.
        cores_per_device: where speeds are timed; None on GPUs.
        steps, proof_steps: those of each level's run, and those before weights are compared.
        levels: what `run_parts` finds of each level; "run" is what the level's --json writes.
        sharded: likewise of each sharded script: its weights and its memory.
        throughput: a group of `benchmarks.harness.records` for each batch.
        memory: rows of `benchmarks.suites.memory`.
    """

    machine: dict
    began: dict
    world_size: int
    cores_per_device: int | None
    global_batch_size: int
    steps: int
    proof_steps: int = PROOF_STEPS
    levels: dict[str, dict] = field(default_factory=lambda: {level: {} for level in ladder.LEVELS})
    sharded: dict[str, dict] = field(default_factory=lambda: {script: {} for script in ladder.SHARDED})
    throughput: list[dict] = field(default_factory=list)
    memory: list[dict] = field(default_factory=list)


def run_parts(settings: Settings, report: Report, begin_part: Callable[[str], None]) -> None:
    """Put the results of every part into `report`; `begin_part` gets its name. Raises RankFailed if a rank fails."""
    # Each level trains as its user would train it, and evaluates the whole test set.
    for level, result in report.levels.items():
        begin_part(f"training {level}")
        result["run"] = train(level, settings)
    # No verdict depends on the speeds; tables and pictures show them.
    for size in settings.batch_sizes:
        begin_part(f"timing all levels in turn, batch {size}")
        rows = throughput.configurations([settings.world_size], size)
        options = MeasureOptions(settings.rounds, settings.data_flags, quick=False)
        report.throughput.append(throughput.measure_in_turns(f"global batch {size}", rows, options))
    # For the verdict IN STEP: every script ends at level 00's weights. One device would be compared with itself.
    several = settings._replace(world_size=max(2, settings.world_size))
    begin_part(f"weights of {BASELINE}")
    baseline = train_exactly(BASELINE, several)
    for script, result in chain(report.levels.items(), report.sharded.items()):
        begin_part(f"weights of {script}")
        weights = baseline if script == BASELINE else train_exactly(script, several)
        result["max_weight_difference"] = max_weight_difference(weights, baseline)
        result["weight_checksum"] = checksum(weights)
    # For the verdict EXACT: ranks count each test sample once, also where they cannot share the samples evenly.
    for level in (BASELINE, *ladder.DISTRIBUTED):
        begin_part(f"evaluation of {level}")
        report.levels[level].update(evaluate(level, settings.data_flags))
    # For the verdict BALANCED: the ranks of DDP hold equally much, unlike the replicas of DataParallel.
    for script, result in chain(report.levels.items(), report.sharded.items()):
        begin_part(f"memory of {script}")
        result["simulated_peak_memory"] = simulate_memory(script, several)
    networks = memory.NETWORKS if settings.full else ("basic_net", "big_output")
    wrappers = memory.WRAPPERS if settings.full else (DATA_PARALLEL, DDP)
    for devices in memory.DEVICES:
        begin_part(f"memory on {devices} devices")
        report.memory += [asdict(row) for row in memory.rows_on(devices, networks, wrappers)]


def train(level: str, settings: Settings) -> dict:
    """The result of a training for a number of steps, and of the whole test set after it."""
    flags = flags_of(level, settings)
    return run_script(level, settings.world_size, [*flags, "--max-steps", str(settings.steps)])


def train_exactly(script: str, settings: Settings) -> dict[str, Tensor]:
    """The weights after PROOF_STEPS steps in float64 without dropout."""
    flags = flags_of(script, settings)
    flags += [*EXACT, "--max-steps", str(PROOF_STEPS), *level_runs.EVALUATE_FEW]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.pt"
        run_script(script, settings.world_size, [*flags, "--save", str(path)])
        return torch.load(path, weights_only=True)


def evaluate(level: str, data_flags: tuple[str, ...]) -> dict:
    """The samples of the whole test set that the ranks count, and their losses. Level 00 has one process."""
    flags = ["--batch-size", str(EVALUATION_BATCH), *data_flags, *EXACT, "--max-steps", "1"]
    result = run_script(level, EVALUATION_RANKS, flags)
    processes = level_runs.processes_of(level, EVALUATION_RANKS)
    return {
        "evaluated_on": {str(processes): result["evaluated"]},
        "eval_loss_sum": result["eval_loss"] * result["evaluated"],
    }


def simulate_memory(script: str, settings: Settings) -> list[dict[str, int]]:
    """The peak bytes of each device by category."""
    flags = flags_of(script, settings)
    by_process = level_runs.run_on_devices(level_runs.peaks, script, settings.world_size, flags, on_cpu=True)
    return [*chain.from_iterable(by_process)]


def run_script(script: str, world_size: int, flags: list[str]) -> dict:
    """Rank 0's result of a training: on GPUs if there are `world_size`, for level 00 too, which is compared."""
    too_few_gpus = world_size > torch.cuda.device_count()
    return level_runs.run_on_devices(level_runs.run_level, script, world_size, flags, too_few_gpus)[0]


def flags_of(script: str, settings: Settings) -> list[str]:
    """The flags of a script for the first of the global batches, which its devices share."""
    return [*level_runs.flags_on(script, settings.world_size, settings.batch_sizes[0]), *settings.data_flags]


def main() -> None:
    options = parse_options()
    records.check_writable(options.out, "--out")
    dataset = provide(options)  # once: each of the trainings would try the download again
    settings = choose_settings(options, dataset, torch.cuda.device_count())
    report = Report(
        machine=machine.hardware_and_versions(),
        began=machine.run_metadata(),
        world_size=settings.world_size,
        cores_per_device=throughput.cores_of_a_device(settings.world_size),
        global_batch_size=settings.batch_sizes[0],
        steps=settings.steps,
    )
    machine.warn_if_busy(report.began["load"])
    if report.cores_per_device is None and not torch.cuda.is_available():
        print(f"{settings.world_size} devices share {available_cores()} cores: no speed-up can show")
    incomplete = options.out / INCOMPLETE
    # disable=None: silent where stderr is not a terminal.
    progress = tqdm(leave=False, disable=None, bar_format="{desc} | {elapsed}", ncols=79)

    def begin_part(name: str) -> None:
        progress.set_description_str(name)
        records.write_json(incomplete, asdict(report))  # with --full the parts before took up to an hour

    try:
        with progress:
            run_parts(settings, report, begin_part)
    except RankFailed as error:
        sys.exit(f"The results of the parts before: {incomplete}\nFAILED: {progress.desc}: {error}")
    except KeyboardInterrupt:
        print(f"The results of the parts before: {incomplete}\nINTERRUPTED: {progress.desc}", file=sys.stderr)
        sys.exit(130)
    record = asdict(report) | {"ended": machine.run_metadata()}
    records.write_json(options.out / f"{COMPARISON}.json", record)
    incomplete.unlink(missing_ok=True)
    print(summary(record))
    written = [f"{COMPARISON}.json", *draw(COMPARISON, record, options.out)]
    print(wrapped(f"Written to {options.out}: {', '.join(written)}"))
    are_kept = all(verdict.kept for verdict in verdicts(record))
    sys.exit(0 if are_kept else 1)


if __name__ == "__main__":
    main()
