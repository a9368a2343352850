"""All levels side by side: the same work at each, timed in turn, against the three promises of the ladder.

python -m benchmarks.compare
python -m benchmarks.compare --full
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from benchmarks.harness import level_runs, machine, records
from benchmarks.harness.options import MeasureOptions
from benchmarks.harness.rows import BASELINE, REPLICATED
from benchmarks.report.comparison_table import summary, wrapped
from benchmarks.report.pictures import COMPARISON, draw
from benchmarks.report.verdicts import verdicts
from benchmarks.suites import memory, throughput
from common import ladder
from common.cores import available_cores
from common.data import provide
from common.data.synthetic import SIZES
from common.errors import fail
from common.numbers import positive
from common.processes import RankFailed, ranks
from common.weights import checksum, max_weight_difference

EXACT = ["--dtype", "float64", "--no-dropout"]
PROOF_STEPS = 10
EVALUATION_RANKS = 3  # Three do not divide 10,000 samples, so padding or dropping shows.
EVALUATION_BATCH = 63  # three ranks can share it
TIMEOUT_SECONDS = 900
INCOMPLETE = "incomplete.json"


class Settings(NamedTuple):
    """The choices that all parts of a comparison share.

    Attributes:
        world_size: processes, or replicas.
        batch_sizes: the global batches at which levels are timed. Everything else is done at the first.
        steps: optimizer steps of each level's training.
        rounds: how often the levels take turns being timed.
        data_flags: the levels' flags that name the dataset.
        full: account for the memory of all networks and wrappers.
    """

    world_size: int
    batch_sizes: tuple[int, ...]
    steps: int
    rounds: int
    data_flags: tuple[str, ...]
    full: bool


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__.splitlines()[0])
    flag = parser.add_argument
    flag("--full", action="store_true", help="whole epochs, batch 256, all networks' memory")
    flag("--world-size", type=positive, metavar="N", help="processes, or replicas (default: one for each GPU, else 2)")
    flag("--steps", type=positive, metavar="N", help="optimizer steps of each level's run (60; --full: an epoch)")
    flag("--rounds", type=positive, metavar="N", help="how often the levels take turns being timed (4; --full: 10)")
    flag("--out", type=Path, default=Path("results"), metavar="PATH", help="folder for the results and the report")
    flag("--dataset", choices=["auto", "mnist", "synthetic"], default="auto")
    flag("--data-dir", default=os.environ.get("MNIST_ROOT", "data"), metavar="PATH", help="holds MNIST/raw")
    return parser.parse_args(argv)


def choose_settings(options: argparse.Namespace, gpus: int) -> Settings:
    """The settings on a machine with so many GPUs: what the flags say, and else the defaults.

    Raises:
        UserError: if --world-size asks for more processes than there are GPUs.
    """
    world_size = options.world_size or gpus or 2
    if 0 < gpus < world_size:
        fail(f"--world-size {world_size}: there are {gpus} GPUs")
    # The largest batches up to these sizes that all processes can share.
    sizes = (64, 256) if options.full else (64,)
    batch_sizes = tuple(max(size // world_size, 1) * world_size for size in sizes)
    epoch = SIZES["train"] // batch_sizes[0]
    return Settings(
        world_size=world_size,
        batch_sizes=batch_sizes,
        steps=options.steps or (epoch if options.full else 60),
        rounds=options.rounds or (10 if options.full else 4),
        data_flags=("--dataset", options.dataset, "--data-dir", options.data_dir),
        full=options.full,
    )


def new_report(settings: Settings) -> dict:
    """The report of a comparison that begins now. `run_parts` fills in the results."""
    return {
        "machine": machine.hardware_and_versions(),
        "began": machine.run_metadata(),
        "world_size": settings.world_size,
        "cores_per_device": throughput.cores_of_a_device(settings.world_size),
        "global_batch_size": settings.batch_sizes[0],
        "steps": settings.steps,
        "proof_steps": PROOF_STEPS,
        "levels": {level: {} for level in ladder.LEVELS},
        "sharded": {script: {} for script in ladder.SHARDED},
        "throughput": [],
        "memory": [],
    }


def run_parts(settings: Settings, folder: Path, show_part: Callable[[str], None], report: dict) -> None:
    """Run every part, after its name is shown, and put its results into `report`, where they stay if a later one fails.

    The weights that are compared are saved in `folder`.

    Raises:
        RankFailed: if a rank of a part fails.
    """
    levels = report["levels"]
    for level in levels:
        show_part(f"training {level}")
        levels[level]["run"] = train(level, settings)
    # The merged dict is new, but each `result` is the report's own.
    for script, result in (levels | report["sharded"]).items():
        show_part(f"weights and memory of {script}")
        result.update(compare_weights(script, settings, folder))
        result["simulated_peak_memory"] = simulate_memory(script, settings)
    for level in (BASELINE, *ladder.DISTRIBUTED):
        show_part(f"evaluation of {level}")
        levels[level].update(evaluate(level, settings))
    for size in settings.batch_sizes:
        show_part(f"timing all levels in turn, batch {size}")
        report["throughput"].append(time_in_turns(size, settings))
    networks = list(memory.NETWORKS) if settings.full else ["basic_net", "big_output"]
    wrappers = memory.ALL_WRAPPERS if settings.full else memory.WRAPPERS
    for devices in memory.DEVICES:
        show_part(f"memory on {devices} devices")
        report["memory"] += memory.rows_on(devices, networks, wrappers)


def train(level: str, settings: Settings) -> dict:
    """The result of a training for a number of steps, and of the whole test set after it."""
    flags = [*level_flags(level, settings), "--max-steps", str(settings.steps)]
    return run_on_ranks(level_runs.train, level, flags, settings.world_size)[0]


def compare_weights(script: str, settings: Settings, folder: Path) -> dict:
    """The distance from level 00's weights after some steps in float64, and the checksum of the script's weights.

    Level 00 comes first: its weights are then in `folder`.
    """
    path = folder / f"{script.replace('/', '_')}.pt"
    proof = [*EXACT, "--max-steps", str(PROOF_STEPS), "--save", str(path), *level_runs.EVALUATE_FEW]
    run_on_ranks(level_runs.train, script, [*level_flags(script, settings), *proof], settings.world_size)
    weights = torch.load(path, weights_only=True)
    baseline = torch.load(folder / f"{BASELINE}.pt", weights_only=True)
    return {"max_weight_difference": max_weight_difference(weights, baseline), "weight_checksum": checksum(weights)}


def simulate_memory(script: str, settings: Settings) -> list[dict[str, int]]:
    """The peak bytes of each device by category."""
    flags = level_flags(script, settings)
    by_process = run_on_ranks(level_runs.peaks, script, flags, settings.world_size, on_cpu=True)
    return [device for devices in by_process for device in devices]


def evaluate(level: str, settings: Settings) -> dict:
    """The samples of the whole test set that EVALUATION_RANKS ranks count, and their losses; at level 00 on one."""
    flags = [*level_flags(level, settings, EVALUATION_BATCH), *EXACT, "--max-steps", "1"]
    result = run_on_ranks(level_runs.train, level, flags, EVALUATION_RANKS)[0]
    processes = EVALUATION_RANKS if level in ladder.DISTRIBUTED else 1
    return {
        "evaluated_on": {str(processes): result["evaluated"]},
        "eval_loss_sum": result["eval_loss"] * result["evaluated"],
    }


def time_in_turns(size: int, settings: Settings) -> dict:
    """The group of all levels' images per second at a global batch, each worker on a device of its own."""
    rows = throughput.configurations({1: size, settings.world_size: size})
    options = MeasureOptions(settings.rounds, settings.data_flags, quick=False)
    return throughput.measure_in_turns(f"global batch {size}", rows, options)


def level_flags(level: str, settings: Settings, batch_size: int | None = None) -> list[str]:
    """The flags of a level for a global batch; by default the first of the settings."""
    flags = ["--batch-size", str(batch_size or settings.batch_sizes[0]), *settings.data_flags]
    if level == REPLICATED:
        flags += ["--replicas", str(settings.world_size)]
    if level == ladder.MESH:
        flags += ["--tensor", "1" if settings.world_size % 2 else "2"]
    return flags


def run_on_ranks(job: Callable, level: str, flags: list[str], world_size: int, on_cpu: bool = False) -> list:
    """A job of `benchmarks.harness.level_runs` on `world_size` processes, or on one if the level has only one.

    The processes share the cores. They run on GPUs if there is one for each, as nccl needs.
    """
    processes = world_size if ladder.runs_on_ranks(level) else 1
    threads = max(1, available_cores() // processes)
    too_few_gpus = processes > torch.cuda.device_count()
    return ranks(processes, on_cpu or too_few_gpus).run(job, level, flags, threads, timeout=TIMEOUT_SECONDS)


def main() -> None:
    options = parse_options()
    records.check_writable(options.out, "--out")
    options.dataset = provide(options)  # once: each of the trainings would try the download again
    settings = choose_settings(options, torch.cuda.device_count())
    report = new_report(settings)
    incomplete = options.out / INCOMPLETE
    machine.warn_if_busy(report["began"]["load"], available_cores())
    try:
        # disable=None: silent where stderr is not a terminal.
        with (
            tempfile.TemporaryDirectory() as folder,
            tqdm(leave=False, disable=None, bar_format="{desc} | {elapsed}", ncols=79) as progress,
        ):
            run_parts(settings, Path(folder), progress.set_description_str, report)
    except BaseException as failure:
        # With --full the parts before it took up to an hour.
        records.write_json(incomplete, report)
        print(f"The results of the parts before: {incomplete}", file=sys.stderr)
        if isinstance(failure, RankFailed):
            sys.exit(f"FAILED: {progress.desc}: {failure}")
        if isinstance(failure, KeyboardInterrupt):
            print(f"INTERRUPTED: {progress.desc}", file=sys.stderr)
            sys.exit(130)
        raise
    incomplete.unlink(missing_ok=True)  # it belongs to a comparison before
    report["ended"] = machine.run_metadata()
    records.write_json(options.out / f"{COMPARISON}.json", report)
    print(summary(report))
    written = [f"{COMPARISON}.json", *draw(COMPARISON, report, options.out)]
    print(wrapped(f"Written to {options.out}: {', '.join(written)}"))
    are_kept = all(verdict.kept for verdict in verdicts(report))
    sys.exit(0 if are_kept else 1)


if __name__ == "__main__":
    main()
