"""Record this machine: the comparison of the levels and all suites, in a folder that can be contributed.

    python -m benchmarks.record --name "2 x RTX 4090"

It checks the machine first, because a number from a busy machine says little: how many GPUs there are, whether other
programs compute, whether MNIST and the peers are there. Then it trains and times every level, proves that all of them
train the same weights, runs every suite, and records the timeline of a step. That takes some 40 minutes. `--quick`
takes a few, to see that all works; its numbers are not worth contributing.
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

from common.cores import available_cores
from common.data import mnist_on_disk
from common.ladder import ROOT

RESULTS = ROOT / "benchmarks" / "results"
PEERS = ("accelerate", "transformers", "lightning")
# Of the cores, busy with something else before we begin.
MOST_LOAD = 0.2


@dataclass(frozen=True)
class Machine:
    """What a record's numbers will depend on.

    Attributes:
        load: the mean number of processes that wanted a core in the last minute; None where the system does not say.
        missing_peers: the libraries that the suites compare with and that are not installed.
    """

    gpus: int
    cores: int
    load: float | None
    mnist: bool
    missing_peers: tuple[str, ...]

    @property
    def processes(self) -> int:
        """One for each GPU; two where there are fewer than two."""
        return max(2, self.gpus)


def look() -> Machine:
    """This machine, now."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    data_dir = os.environ.get("MNIST_ROOT", "data")
    missing = tuple(name for name in PEERS if find_spec(name) is None)
    return Machine(torch.cuda.device_count(), available_cores(), load, mnist_on_disk(data_dir), missing)


def remarks(machine: Machine) -> list[str]:
    """What the owner of the machine should know, or mend, before the numbers are taken."""
    found = []
    if machine.gpus < 2:
        found.append(f"{machine.gpus} GPUs: {machine.processes} processes share what there is, as in the CPU's record")
    if machine.load is not None and machine.load > MOST_LOAD * machine.cores:
        found.append(f"the machine is busy (load {machine.load:.1f}): stop other programs, or the rows will be noisy")
    if not machine.mnist:
        found.append("MNIST is not on disk: it is downloaded, or the synthetic digits are taken")
    if machine.missing_peers:
        found.append(f"not installed, so not compared with: {', '.join(machine.missing_peers)}")
    return found


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
class Part:
    """One command of the recording."""

    title: str
    command: list[str]


def parts(machine: Machine, folder: Path, quick: bool) -> list[Part]:
    """What is run, in order. Each part writes into `folder`."""
    compare = ["-m", "benchmarks.compare", "--out", str(folder), "--world-size", str(machine.processes)]
    suites = ["-m", "pytest", "-q", "benchmarks", "--record", str(folder)]
    timeline = ["-m", "benchmarks.timeline", "--out", str(folder)]
    if quick:
        timeline.append("--quick")
        suites += ["--quick", "-k", "evaluation or memory"]
    else:
        compare.append("--full")
    return [
        Part("all levels: training, proof, speed and memory", [sys.executable, *compare]),
        Part("the suites", [sys.executable, *suites]),
        Part("the timeline of a step", [sys.executable, *timeline]),
    ]


def run_part(part: Part) -> int:
    """Run it in the repository's folder, with its output on ours. Returns its exit code."""
    return subprocess.run(part.command, cwd=ROOT).returncode


def record(machine: Machine, folder: Path, quick: bool, run: Callable[[Part], int] = run_part) -> list[str]:
    """Run every part, also after one that failed. Returns the titles of those that failed."""
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for part in parts(machine, folder, quick):
        print(f"\n== {part.title}", flush=True)
        if run(part) != 0:
            failed.append(part.title)
    # Megabytes that `benchmarks.report.publish` and `benchmarks.report.timeline_plot` draw again from the results.
    for path in (folder / "report.html", *folder.glob("timeline-*.trace.json")):
        path.unlink(missing_ok=True)
    return failed


def how_to_contribute(name: str, folder: Path) -> str:
    """The last words: where the record is, and what to do with it."""
    place = folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder
    return "\n".join(
        [
            "",
            f"The record of {name} is in {place}. To contribute it:",
            f"    git switch -c record-{folder.name}",
            f"    git add {place}",
            f'    git commit -m "Record {name}"',
            "and open a pull request. Say in it how the GPUs are linked (nvidia-smi topo -m), and whether anything",
            "else ran on the machine.",
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
    machine = look()
    print(f"{options.name}: {machine.gpus} GPUs, {machine.cores} CPU cores, {machine.processes} processes")
    for remark in remarks(machine):
        print(f"  note: {remark}")
    failed = record(machine, folder, options.quick)
    if failed:
        print(f"\nFAILED: {'; '.join(failed)}. What was recorded is in {folder}.")
        sys.exit(1)
    print(how_to_contribute(options.name, folder))


if __name__ == "__main__":
    main()
