"""Record this machine: the comparison of the levels and all suites, in a folder that can be contributed.

    python -m benchmarks.record --name "2 x RTX 4090"

On GPUs it begins with the list of tests/gpu/README.md. Then it trains and times every level, proves that all of them
train the same weights, and runs every suite. A number from a busy machine says little: stop other programs first.
`--quick` takes a few minutes, to see that all works; its numbers are not worth contributing.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.harness.records import why_not_writable
from common.ladder import ROOT

RESULTS = ROOT / "benchmarks" / "results"
# Tests that are skipped where there is no GPU.
GPU_CHECKS = ("tests/unit/test_data.py", "tests/unit/benchmarks/test_memory.py")


def folder_of(name: str) -> Path:
    """The folder of the record called `name`: its letters and digits, with hyphens between."""
    return RESULTS / "-".join(re.findall(r"[a-z0-9]+", name.lower()))


def first_on_gpus(gpus: int) -> dict[str, list[str]]:
    """The checks that only a GPU can answer; tests/gpu/README.md asks for them before anything is measured."""
    pytest = [sys.executable, "-m", "pytest", "-q"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
    short = ["--dataset", "synthetic", "--max-steps", "100", "--batch-size", str(8 * gpus)]
    return {
        "the imitated GPUs": [*pytest, "tests/gpu"],
        "the checks on a real GPU": [*pytest, *GPU_CHECKS],
        "level 00 on one GPU": [sys.executable, "00_single_gpu/train.py", *short],
        "level 02 on all GPUs": [*torchrun, "02_ddp_raw/train.py", *short],
        "level 03 in bf16": [*torchrun, "03_accelerate/train_full.py", "--mixed-precision", "bf16", *short],
        "level 04 in fp16": [*torchrun, "04_trainer/train_full.py", "--mixed-precision", "fp16", *short],
    }


def stages(folder: Path, quick: bool, gpus: int = 0) -> dict[str, list[str]]:
    """The commands of a recording by their titles, in order. Each but those of `first_on_gpus` writes into `folder`."""
    compare = [sys.executable, "-m", "benchmarks.compare", "--out", str(folder)]
    suites = [sys.executable, "-m", "pytest", "-q", "benchmarks", "--record", str(folder)]
    if quick:
        compare += ["--steps", "10", "--rounds", "2"]
        suites += ["--quick", "-k", "memory or timeline"]
    else:
        compare.append("--full")
    first = first_on_gpus(gpus) if gpus else {}
    return first | {"all levels: training, proof, speed and memory": compare, "the suites": suites}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.record", description=__doc__.splitlines()[0])
    parser.add_argument("--name", required=True, help='what to call this machine, such as "2 x RTX 4090"')
    parser.add_argument("--quick", action="store_true", help="a few minutes, to see that all works")
    parser.add_argument("--again", action="store_true", help="replace a record of this name")
    options = parser.parse_args(argv)
    folder = folder_of(options.name)
    if folder == RESULTS:
        parser.error(f"--name {options.name!r} has no letter or digit")
    if folder.exists() and not options.again:
        parser.error(f"there is a record of this name in {folder}: name another, or --again replaces it")
    if reason := why_not_writable(folder):
        parser.error(reason)
    failed = []
    for title, command in stages(folder, options.quick, torch.cuda.device_count()).items():
        print(f"\n== {title}", flush=True)
        if subprocess.run(command, cwd=ROOT).returncode:  # the other stages run all the same
            failed.append(title)
    if failed:
        sys.exit(f"\nFAILED: {'; '.join(failed)}. What was recorded is in {folder}.")
    print(f"\nThe record of {options.name} is in {folder}. To contribute it, open a pull request with this folder.")


if __name__ == "__main__":
    main()
