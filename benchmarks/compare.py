"""All levels side by side: each started as a user would, all on the same work, in one table.

python -m benchmarks.compare
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import torch
from tqdm import tqdm

from common import ladder
from common.accelerator.state import available_cores

PROOF_STEPS = 10
TIMEOUT = 600  # seconds, for any one part


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__.splitlines()[0])
    flag = parser.add_argument
    flag("--world-size", type=int, default=2, metavar="N", help="processes of the levels that have several, replicas")
    flag("--steps", type=int, default=120, metavar="N", help="optimizer steps of each timed run")
    flag("--out", type=Path, default=Path("results"), metavar="PATH", help="folder for results.json")
    flag("--dataset", choices=["auto", "mnist", "synthetic"], default="auto")
    flag("--data-dir", metavar="PATH", help="holds MNIST/raw")
    options = parser.parse_args()
    if options.world_size < 1 or options.steps < 1:
        parser.error("--world-size and --steps must be at least 1")
    # The largest batch up to the usual 64 that all processes can share.
    options.batch_size = max(64 // options.world_size, 1) * options.world_size
    return options


class Comparison:
    """The runs of one comparison, and what came of them so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.levels = ladder.levels()
        self.results: dict[str, dict] = {level: {} for level in self.levels}

    def run(self) -> dict:
        """Run everything, writing `results.json` after each part. Returns what is in it."""
        distributed = [level for level in self.levels if level in ladder.DISTRIBUTED]
        groups = [["00_single_gpu"], ["01_data_parallel"], distributed]
        parts = len(self.levels) + len(groups)
        # disable=None: silent where stderr is not a terminal.
        with tempfile.TemporaryDirectory() as name, tqdm(total=parts, leave=False, disable=None) as bar:
            folder = Path(name)
            for level in self.levels:
                bar.set_description_str(f"training {level}")
                self.train(level, folder)
                bar.update()
            for group in groups:
                bar.set_description_str(f"proving {', '.join(group)}")
                self.prove(group, folder)
                bar.update()
        return self.write(complete=True)

    def train(self, level: str, folder: Path) -> None:
        """The level as a user starts it: training for a number of steps, then the whole test set."""
        path = folder / f"{level}.json"
        flags = [*self.flags([level]), "--max-steps", str(self.options.steps), "--json", str(path)]
        self.start([level], [str(ladder.script(level)), *flags])
        self.results[level]["run"] = json.loads(path.read_text())
        self.write(complete=False)

    def prove(self, group: list[str], folder: Path) -> None:
        """Weights and memory of several levels, from one start."""
        arguments = [str(folder), ",".join(group), str(PROOF_STEPS), *self.flags(group)]
        self.start(group, ["-m", "benchmarks.proof", *arguments])
        baseline = torch.load(folder / "00_single_gpu.pt", weights_only=True)
        for level in group:
            weights = torch.load(folder / f"{level}.pt", weights_only=True)
            devices = [json.loads(path.read_text()) for path in sorted(folder.glob(f"{level}.[0-9]*.json"))]
            self.results[level]["max_weight_difference"] = farthest(weights, baseline)
            self.results[level]["weight_checksum"] = checksum(weights)
            self.results[level]["simulated_peak_memory"] = [device for rank in devices for device in rank]
        self.write(complete=False)

    def flags(self, group: list[str]) -> list[str]:
        options = self.options
        flags = ["--batch-size", str(options.batch_size), "--dataset", options.dataset]
        flags += ["--data-dir", options.data_dir] if options.data_dir else []
        return flags + (["--replicas", str(options.world_size)] if "01_data_parallel" in group else [])

    def start(self, group: list[str], arguments: list[str]) -> None:
        """Run Python on `arguments`, under torchrun for levels of several processes; its output shows on failure."""
        command = [sys.executable]
        if group[0] in ladder.DISTRIBUTED:
            command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.options.world_size)]
        try:
            done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            sys.exit(f"error: {', '.join(group)} did not end within {TIMEOUT} s")
        if done.returncode:
            sys.exit(f"{done.stdout}{done.stderr}error: {', '.join(group)} ended with exit code {done.returncode}")
        for line in done.stderr.splitlines():
            if line.startswith("NOT MNIST") and group == self.levels[:1]:
                tqdm.write(line, file=sys.stderr)

    def write(self, complete: bool) -> dict:
        report = {
            "complete": complete,
            "machine": machine(),
            "world_size": self.options.world_size,
            "global_batch_size": self.options.batch_size,
            "steps": self.options.steps,
            "proof_steps": PROOF_STEPS,
            "levels": self.results,
        }
        draft = self.options.out / ".results.json"
        draft.write_text(json.dumps(report, indent=2) + "\n")
        draft.replace(self.options.out / "results.json")
        return report


def machine() -> dict:
    """The hardware and the versions that the numbers belong to."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "processor": platform.machine(),
        "cores": available_cores(),
        "gpus": gpus,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def farthest(weights: dict, others: dict) -> float:
    """The largest absolute difference between two state dicts."""
    return max((weights[name] - others[name]).abs().max().item() for name in others)


def checksum(weights: dict) -> str:
    """CRC-32 of the weights rounded to 1e-4, far above the rounding errors of float64: equal runs show equal digits."""
    crc = 0
    for name in sorted(weights):
        crc = zlib.crc32((weights[name] * 1e4).round().long().numpy().tobytes(), crc)
    return f"{crc:08x}"


def introduction(options: argparse.Namespace) -> str:
    this = machine()
    hardware = ", ".join(this["gpus"]) or "no GPU"
    return (
        f"torch {this['torch']}, {this['cores']} CPU cores, {hardware}. "
        f"Every level: global batch {options.batch_size}, {options.steps} steps, seed 42."
    )


COLUMNS = "{:<16} {:>5} {:>8} {:>9} {:>8} {:>12} {:>7} {:>8}"


def table(report: dict) -> str:
    """The comparison in 80 columns."""
    lines = [
        COLUMNS.format("", "pro-", "", "eval-", "images", "peak MiB", "max", "weight"),
        COLUMNS.format("level", "cess", "accuracy", "uated", "per s", "per device", "|Δw|", "checksum"),
    ]
    for level, result in report["levels"].items():
        run = result["run"]
        lines.append(
            COLUMNS.format(
                level,
                run["world_size"] if level in ladder.DISTRIBUTED else 1,
                f"{run['accuracy']:.2%}",
                run["evaluated"],
                f"{run['images_per_sec']:.0f}",
                per_device(peaks(result)),
                f"{result['max_weight_difference']:.0e}",
                result["weight_checksum"],
            )
        )
    return "\n".join(lines)


def peaks(result: dict) -> list[int]:
    """Peak bytes per device: measured by the allocator where there is one, else simulated."""
    return result["run"]["peak_memory_bytes"] or [sum(peak.values()) for peak in result["simulated_peak_memory"]]


def per_device(sizes: list[int]) -> str:
    """'51', '39 22' or, where all but the first are alike, '38 7×16'."""
    first, *others = [f"{size / 2**20:.0f}" for size in sizes]
    if len(others) > 1 and len(set(others)) == 1:
        others = [f"{len(others)}×{others[0]}"]
    return " ".join([first, *others])


def notes(report: dict) -> str:
    """What the columns mean, and the verdict."""
    runs = report["levels"].values()
    names = {result["run"]["dataset"] for result in runs}
    measured = all(result["run"]["peak_memory_bytes"] for result in runs)
    worst = max(result["max_weight_difference"] for result in runs)
    verdict = "IN STEP" if worst <= 1e-9 else "OUT OF STEP"
    return "\n".join(
        [
            f"Dataset: {', '.join(sorted(names))}. Memory: "
            + ("measured by the CUDA allocator." if measured else "simulated, every tensor charged to its device."),
            f"Weights: after {report['proof_steps']} steps in float64 without dropout, against level 00.",
            f"{verdict}: {len(runs)} levels, max |Δw| = {worst:.1e}",
        ]
    )


def main() -> None:
    options = parse_options()
    options.out.mkdir(parents=True, exist_ok=True)
    print(introduction(options), flush=True)
    report = Comparison(options).run()
    print(f"\n{table(report)}\n\n{notes(report)}\nWritten: {options.out / 'results.json'}")


if __name__ == "__main__":
    main()
