"""Records of benchmarks: one dict per group of rows, to write as JSON, to print and to draw.

    {
      "group": "strong scaling, global batch 64",
      "unit": "images/s",
      "rounds": 6,
      "rows": {
        "02_ddp_raw, 2 processes": {
          "median": 719.4, "low": 712.0, "high": 731.9, "spread": 0.0277, "noisy": false,
          "samples": [719.1, …],              one per round, in the order of the rounds
          "level": "02_ddp_raw", …            what is known of the row; each group's own keys
        }, …
      },
      "pairs": [
        {"of": "02_ddp_raw, 2 processes", "to": "00_single_gpu", "kind": "ratio",
         "median": 0.902, "low": 0.893, "high": 0.911, "spread": 0.02,
         "interval": [0.889, 0.914], "confidence": 0.96875}, …     of the median
      ]
    }

`low` and `high` are quartiles (error bars); spread and noisy are defined in `benchmarks.harness.paired`. A pair
compares two rows round by round: of / to for the kind "ratio", of − to in the group's unit for "difference".

A file holds one suite: {"suite": "throughput", "machine": {…}, "began": {…}, "ended": {…}, "groups": [group, …]}.
`began` and `ended` are the `run_metadata` before and after it was measured. `benchmarks.suites.sharing` has "rows" in
place of the groups, which `benchmarks.report.group_table.tables` prints.
"""

import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks.harness import paired
from benchmarks.harness.paired import Samples, Summary, summarise
from common import ladder
from common.cores import available_cores
from common.errors import fail
from common.files import write_atomically
from common.instruments.result import quantity

SIGNIFICANT_DIGITS = 5


def group(
    name: str,
    unit: str,
    samples: Samples,
    metadata: dict[str, dict] | None = None,
    ratios: Iterable[tuple[str, str]] = (),
    differences: Iterable[tuple[str, str]] = (),
) -> dict:
    """The record of one group.

    Args:
        samples: of `benchmarks.harness.paired.take_turns`.
        metadata: of each row, what else to keep.
        ratios, differences: the pairs (of, to) of rows to compare. A pair is left out where a row was not measured.
    """
    rows = {}
    for row, values in samples.items():
        summary = summarise(values)
        measured = {"noisy": summary.noisy, "samples": [rounded(value) for value in values]}
        rows[row] = (metadata or {}).get(row, {}) | _numbers(summary) | measured
    pairs = []
    for of, to in ratios:
        if of in samples and to in samples:
            by_round = paired.ratios(samples[of], samples[to])
            pairs.append({"of": of, "to": to, "kind": "ratio"} | _paired(by_round))
    for of, to in differences:
        if of in samples and to in samples:
            by_round = paired.differences(samples[of], samples[to])
            pairs.append({"of": of, "to": to, "kind": "difference"} | _paired(by_round))
    return {
        "group": name,
        "unit": unit,
        "rounds": max(map(len, samples.values()), default=0),
        "rows": rows,
        "pairs": pairs,
    }


def _paired(by_round: list[float]) -> dict:
    interval = paired.interval_of_median(by_round)
    return _numbers(summarise(by_round)) | {
        "interval": [rounded(interval.low), rounded(interval.high)],
        "confidence": rounded(interval.confidence),
    }


def _numbers(summary: Summary) -> dict:
    return {name: rounded(value) for name, value in summary._asdict().items()}


def rounded(number: float) -> float:
    return float(f"{number:.{SIGNIFICANT_DIGITS}g}")


def write_json(path: Path, content: dict) -> None:
    """Write a file for people and programs, complete or not at all."""
    write_atomically(path, json.dumps(content, indent=1) + "\n")


def check_writable(folder: Path, flag: str) -> None:
    """Make `folder` if it is not there, and try to write a file into it.

    Raises:
        UserError: if that fails, after one line that names the flag.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        fail(f"{flag}: nothing can be written to {folder}: {error.strerror}")


def machine() -> dict:
    """The hardware and the versions that the numbers belong to."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "processor": _processor(),
        "cores": available_cores(),
        "gpus": gpus,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def run_metadata() -> dict:
    """Circumstances of a recording: they differ from run to run, and so are no part of the machine."""
    return {
        "commit": _commit(),
        "command": _command(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "load": load(),
    }


def _commit() -> str | None:
    """The commit, with "-dirty" if a file differs from it; records do not count, as those just written differ."""
    git = ("git", "--no-optional-locks", "-C", str(ladder.ROOT))
    commit = _output(*git, "rev-parse", "--short=12", "HEAD")
    changed = _output(*git, "status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
    return f"{commit}-dirty" if commit and changed else commit


def load() -> list[float] | None:
    """The machine's load averages; None where the system does not tell them."""
    if not hasattr(os, "getloadavg"):
        return None
    return [round(value, 2) for value in os.getloadavg()]


def warn_if_busy(load: list[float] | None, cores: int) -> None:
    """Say on stderr that other programs compute on this machine, if the `load` of `run_metadata` shows it."""
    if load and load[0] >= cores / 2:
        busy = f"This machine is busy: load {load[0]:.1f} on {quantity(cores, 'core')}. Do not trust the speeds."
        print(busy, file=sys.stderr, flush=True)


def _command() -> str:
    """The command that a user typed, without the folders of this machine."""
    words = []
    for word in sys.orig_argv:
        path = Path(word)
        words.append(path.name if path.is_absolute() else word)
    return shlex.join(words)


def _output(*command: str) -> str | None:
    """The output of the command, or None where it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _processor() -> str:
    """The processor's name where Linux tells it, else its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    known = cpuinfo.read_text() if cpuinfo.exists() else ""
    name = re.search(r"^model name\s*: *(.*)$", known, re.MULTILINE)
    return name[1].strip() if name else platform.machine()
