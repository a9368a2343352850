"""Record this machine: the comparison of the levels and all suites, in a folder that can be contributed.

    python -m benchmarks.record --name "2 x RTX 4090"

It checks the machine first, because a number from a busy machine says little: how many GPUs there are, whether other
programs compute, whether MNIST and the peers are there. On GPUs it begins with the list of tests/gpu/README.md. Then it
trains and times every level, proves that all of them train the same weights, and runs every suite. That takes some 40
minutes. `--quick` takes a few, to see that all works; its numbers are not worth contributing.
"""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.harness.load import busy_cores, is_busy
from benchmarks.harness.records import why_not_writable
from common.cores import available_cores
from common.data import mnist_on_disk
from common.ladder import ROOT

RESULTS = ROOT / "benchmarks" / "results"
# Tests that are skipped where there is no GPU.
GPU_CHECKS = (
    "tests/unit/test_data.py",
    "tests/unit/benchmarks/test_memory.py",
)
PEERS = ("accelerate", "transformers", "lightning")


@dataclass(frozen=True)
class Conditions:
    """Conditions that a record's numbers will depend on.

    Attributes:
        busy: how many of the cores compute something else; None where the system does not say.
        missing_peers: the libraries that the suites compare with and that are not installed.
    """

    gpus: int
    cores: int
    busy: float | None
    mnist: bool
    missing_peers: tuple[str, ...]

    @property
    def processes(self) -> int:
        """One for each GPU; two where there are fewer than two."""
        return max(2, self.gpus)


def conditions() -> Conditions:
    """Those of this machine, now."""
    data_dir = os.environ.get("MNIST_ROOT", "data")
    missing = tuple(name for name in PEERS if find_spec(name) is None)
    return Conditions(torch.cuda.device_count(), available_cores(), busy_cores(), mnist_on_disk(data_dir), missing)


def remarks(found: Conditions) -> list[str]:
    """Remarks to the owner of the machine: facts to know, or to mend, before the numbers are taken."""
    lines = []
    if found.gpus < 2:
        lines.append(f"{found.gpus} GPUs: {found.processes} processes share what there is, as in the CPU's record")
    if is_busy(found.busy, found.cores):
        busy = f"others use {found.busy:.1f} of {found.cores} cores"
        lines.append(f"the machine is busy ({busy}): stop other programs, or the rows will be noisy")
    if not found.mnist:
        lines.append("MNIST is not on disk: it is downloaded, or the synthetic digits are taken")
    if found.missing_peers:
        lines.append(f"not installed, so not compared with: {', '.join(found.missing_peers)}")
    return lines


def folder_of(name: str) -> Path:
    """The folder of the record called `name`: its letters and digits, with hyphens between.

    Raises:
        ValueError: if nothing is left of the name.
    """
    words = re.findall(r"[a-z0-9]+", name.lower())
    if not words:
        raise ValueError(f"--name {name!r} has no letter or digit")
    return RESULTS / "-".join(words)


@dataclass(frozen=True)
class Stage:
    """One command of the recording."""

    title: str
    command: list[str]


def first_on_gpus(gpus: int) -> list[Stage]:
    """The checks that only a GPU can answer; tests/gpu/README.md asks for them before anything is measured."""
    python = [sys.executable]
    pytest = [sys.executable, "-m", "pytest", "-q"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
    short = ["--dataset", "synthetic", "--max-steps", "100", "--batch-size", str(8 * gpus)]
    in_bf16 = ["--mixed-precision", "bf16", *short]
    in_fp16 = ["--mixed-precision", "fp16", *short]
    commands = {
        "first: the imitated GPUs": [*pytest, "tests/gpu"],
        "first: the checks on a real GPU": [*pytest, *GPU_CHECKS],
        "first: level 00 on one GPU": [*python, "00_single_gpu/train.py", *short],
        "first: level 02 on all GPUs": [*torchrun, "02_ddp_raw/train.py", *short],
        "first: level 03 in bf16": [*torchrun, "03_accelerate/train_full.py", *in_bf16],
        "first: level 04 in fp16": [*torchrun, "04_trainer/train_full.py", *in_fp16],
    }
    return [Stage(title, command) for title, command in commands.items()]


def stages(processes: int, folder: Path, quick: bool, gpus: int = 0) -> list[Stage]:
    """The stages of a recording, in order. Each but those of `first_on_gpus` writes into `folder`."""
    compare = ["-m", "benchmarks.compare", "--out", str(folder), "--world-size", str(processes)]
    suites = ["-m", "pytest", "-q", "benchmarks", "--record", str(folder)]
    if quick:
        compare += ["--steps", "10", "--rounds", "2"]
        suites += ["--quick", "-k", "memory or timeline"]
    else:
        compare.append("--full")
    return [
        *(first_on_gpus(gpus) if gpus else []),
        Stage("all levels: training, proof, speed and memory", [sys.executable, *compare]),
        Stage("the suites", [sys.executable, *suites]),
    ]


def run_stage(stage: Stage) -> int:
    """Run it in the repository's folder, with its output on ours. Returns its exit code."""
    return subprocess.run(stage.command, cwd=ROOT).returncode


def record(
    processes: int, folder: Path, quick: bool, run: Callable[[Stage], int] = run_stage, gpus: int = 0
) -> list[str]:
    """Run every stage, also after one that failed. Returns the titles of those that failed."""
    failed = []
    for stage in stages(processes, folder, quick, gpus):
        print(f"\n== {stage.title}", flush=True)
        if run(stage) != 0:
            failed.append(stage.title)
    return failed


def last_words(name: str, folder: Path, gpus: int, quick: bool) -> str:
    """The place of the record, and what to do with it."""
    place = folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder
    if quick:
        return (
            f"\nEverything runs here. The numbers in {place} say little. To record {name}:\n"
            f'    python -m benchmarks.record --name "{name}" --again'
        )
    asked = "Say in it whether anything else ran on the machine"
    if gpus > 1:
        asked += ", and how the GPUs are linked (nvidia-smi topo -m)"
    return "\n".join(
        [
            "",
            f"The record of {name} is in {place}. To contribute it:",
            f"    git switch -c record-{folder.name}",
            f"    git add {place}",
            f'    git commit -m "Record {name}"',
            f"and open a pull request. {asked}.",
        ]
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.record", description=__doc__.splitlines()[0])
    parser.add_argument("--name", required=True, help='what to call this machine, such as "2 x RTX 4090"')
    parser.add_argument("--quick", action="store_true", help="a few minutes, to see that all works")
    parser.add_argument("--again", action="store_true", help="replace a record of this name")
    options = parser.parse_args(argv)
    try:
        folder = folder_of(options.name)
    except ValueError as error:
        parser.error(str(error))
    if folder.exists() and not options.again:
        parser.error(f"there is a record of this name in {folder}: name another, or --again replaces it")
    if reason := why_not_writable(folder):
        parser.error(reason)
    found = conditions()
    print(f"{options.name}: {found.gpus} GPUs, {found.cores} CPU cores, {found.processes} processes")
    for remark in remarks(found):
        print(f"  note: {remark}")
    failed = record(found.processes, folder, options.quick, gpus=found.gpus)
    if failed:
        print(f"\nFAILED: {'; '.join(failed)}. What was recorded is in {folder}.")
        sys.exit(1)
    print(last_words(options.name, folder, found.gpus, options.quick))


if __name__ == "__main__":
    main()
