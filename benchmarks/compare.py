"""All levels side by side: the same work at each, timed in turn, against the three promises of the ladder.

python -m benchmarks.compare
python -m benchmarks.compare --full
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks.harness import level_runs, records
from benchmarks.harness.rows import BASELINE
from benchmarks.report.pictures import COMPARISON, draw
from benchmarks.report.table import summary, wrapped
from benchmarks.report.verdicts import verdicts
from benchmarks.suites import memory, throughput
from common import ladder
from common.cores import available_cores
from common.data.synthetic import SIZES
from common.numbers import positive
from common.processes import RankFailed, ranks
from common.weights import checksum, farthest

EXACT = ["--dtype", "float64", "--no-dropout"]
PROOF_STEPS = 10
EVALUATION_RANKS = 3  # does not divide 10,000 samples, so that padding or dropping shows
TIMEOUT = 900  # seconds, for any one part


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__.splitlines()[0])
    flag = parser.add_argument
    flag("--full", action="store_true", help="whole epochs, batch 256, all networks' memory")
    flag("--world-size", type=positive, metavar="N", help="processes, or replicas (default: one for each GPU, else 2)")
    flag("--steps", type=positive, metavar="N", help="optimizer steps of each level's run (60; --full: an epoch)")
    flag("--rounds", type=positive, metavar="N", help="how often the levels take turns being timed (4; --full: 10)")
    flag("--out", type=Path, default=Path("results"), metavar="PATH", help="folder for the results and the report")
    flag("--dataset", choices=["auto", "mnist", "synthetic"], default="auto")
    flag("--data-dir", metavar="PATH", help="holds MNIST/raw")
    options = parser.parse_args(argv)
    gpus = torch.cuda.device_count()
    if options.world_size is None:
        options.world_size = gpus or 2
    if gpus and options.world_size > gpus:
        parser.error(f"--world-size {options.world_size}: there are {gpus} GPUs")
    sizes = (64, 256) if options.full else (64,)
    options.batch_sizes = []
    for size in sizes:
        # The largest batch up to this size that all processes can share.
        options.batch_sizes.append(max(size // options.world_size, 1) * options.world_size)
    epoch = SIZES["train"] // options.batch_sizes[0]
    options.steps = options.steps or (epoch if options.full else 60)
    options.rounds = options.rounds or (10 if options.full else 4)
    return options


class Comparison:
    """The parts of one comparison, and what came of them. The weights that are compared are saved in `folder`."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.levels = ladder.LEVELS
        self.report = {
            "machine": records.machine(),
            "began": records.run_metadata(),
            "world_size": options.world_size,
            "cores_per_device": throughput.cores_of_a_device(options.world_size),
            "global_batch_size": options.batch_sizes[0],
            "steps": options.steps,
            "proof_steps": PROOF_STEPS,
            "levels": {level: {} for level in self.levels},
            "sharded": {script: {} for script in ladder.SHARDED},
        }

    def run(self) -> None:
        """Run every part. The first one that fails ends the comparison, and nothing is written."""
        # disable=None: silent where stderr is not a terminal.
        with tqdm(leave=False, disable=None, bar_format="{desc} | {elapsed}", ncols=79) as progress:
            try:
                for level in self.levels:
                    progress.set_description_str(f"training {level}")
                    self.train(level)
                for script, result in (self.report["levels"] | self.report["sharded"]).items():
                    progress.set_description_str(f"weights and memory of {script}")
                    self.prove(script, result)
                for level in (BASELINE, *ladder.DISTRIBUTED):
                    progress.set_description_str(f"evaluation of {level}")
                    self.evaluate(level)
                for size in self.options.batch_sizes:
                    progress.set_description_str(f"timing all levels in turn, batch {size}")
                    self.time(size)
                for devices in memory.DEVICES:
                    progress.set_description_str(f"memory on {devices} devices")
                    self.account(devices)
            except (RankFailed, ValueError) as failure:
                sys.exit(f"FAILED: {progress.desc}: {failure}")
        self.report["ended"] = records.run_metadata()

    def train(self, level: str) -> None:
        """Training for a number of steps, then the whole test set."""
        flags = [*self.flags(level), "--max-steps", str(self.options.steps)]
        self.report["levels"][level]["run"] = self.run_on_ranks(level_runs.train, level, flags)[0]

    def prove(self, level: str, result: dict) -> None:
        """The weights' distance from level 00's after steps in float64, and the bytes on each device."""
        path = self.folder / f"{level.replace('/', '_')}.pt"
        baseline = self.folder / f"{BASELINE}.pt"  # the first that is trained
        exact = [*EXACT, "--max-steps", str(PROOF_STEPS), "--save", str(path), *level_runs.EVALUATE_FEW]
        self.run_on_ranks(level_runs.train, level, [*self.flags(level), *exact])
        weights = torch.load(path, weights_only=True)
        result["max_weight_difference"] = farthest(weights, torch.load(baseline, weights_only=True))
        result["weight_checksum"] = checksum(weights)
        peaks = self.run_on_ranks(level_runs.peaks, level, self.flags(level), on_cpu=True)
        result["simulated_peak_memory"] = [device for rank in peaks for device in rank]

    def evaluate(self, level: str) -> None:
        """The whole test set on a number of ranks that it does not divide by, and its losses; at level 00 on one."""
        flags = [*self.flags(level, 64 // EVALUATION_RANKS * EVALUATION_RANKS), *EXACT, "--max-steps", "1"]
        result = self.run_on_ranks(level_runs.train, level, flags, world_size=EVALUATION_RANKS)[0]
        processes = EVALUATION_RANKS if level in ladder.DISTRIBUTED else 1
        self.report["levels"][level]["evaluated_on"] = {str(processes): result["evaluated"]}
        self.report["levels"][level]["eval_loss_sum"] = result["eval_loss"] * result["evaluated"]

    def time(self, size: int) -> None:
        """Images per second, the levels taking turns, each worker on a device of its own."""
        configurations = throughput.configurations({1: size, self.options.world_size: size})
        data_flags = tuple(self.data_flags())
        steps = throughput.calibrated(configurations, data_flags)
        title = f"global batch {size}"
        group = throughput.measure_in_turns(title, configurations, data_flags, steps, self.options.rounds)
        self.report.setdefault("throughput", []).append(group)

    def account(self, devices: int) -> None:
        """Memory of DataParallel and DDP on several devices; with --full also of the wrappers that lower it."""
        if self.options.full:
            rows = memory.rows_on(devices, list(memory.NETWORKS), memory.ALL_WRAPPERS)
        else:
            rows = memory.rows_on(devices, ["basic_net", "big_output"])
        self.report.setdefault("memory", []).extend(rows)

    def run_on_ranks(
        self, job: Callable, level: str, flags: list[str], world_size: int | None = None, on_cpu: bool = False
    ) -> list:
        """A job of `benchmarks.harness.level_runs` on the processes of this level, which share the cores."""
        processes = 1
        if ladder.runs_on_ranks(level):
            processes = world_size or self.options.world_size
        threads = max(1, available_cores() // processes)
        too_few_gpus = processes > torch.cuda.device_count()  # nccl needs one for each process
        return ranks(processes, on_cpu or too_few_gpus).run(job, level, flags, threads, timeout=TIMEOUT)

    def flags(self, level: str, batch_size: int | None = None) -> list[str]:
        size = batch_size or self.options.batch_sizes[0]
        flags = ["--batch-size", str(size), *self.data_flags()]
        if level == "01_data_parallel":
            flags += ["--replicas", str(self.options.world_size)]
        if level == ladder.MESH:
            flags += ["--tensor", "1" if self.options.world_size % 2 else "2"]
        return flags

    def data_flags(self) -> list[str]:
        flags = ["--dataset", self.options.dataset]
        if self.options.data_dir:
            flags += ["--data-dir", self.options.data_dir]
        return flags


def main() -> None:
    options = parse_options()
    if reason := records.why_not_writable(options.out):
        sys.exit(f"error: --out: {reason}")
    with tempfile.TemporaryDirectory() as folder:
        comparison = Comparison(options, Path(folder))
        if warning := records.busy(comparison.report["began"]["load"], available_cores()):
            print(warning, file=sys.stderr, flush=True)
        try:
            comparison.run()
        except KeyboardInterrupt:
            print("INTERRUPTED: nothing is written", file=sys.stderr)
            sys.exit(130)
    report = comparison.report
    records.write_json(options.out / f"{COMPARISON}.json", report)
    print(summary(report))
    written = [f"{COMPARISON}.json", *draw(COMPARISON, report, options.out)]
    print(wrapped(f"Written to {options.out}: {', '.join(written)}"))
    are_kept = all(verdict.kept for verdict in verdicts(report))
    sys.exit(0 if are_kept else 1)


if __name__ == "__main__":
    main()
