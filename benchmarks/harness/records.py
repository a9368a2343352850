"""Records of benchmarks: one dict per group of rows, to write as JSON, to print and to plot.

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
         "interval": [0.889, 0.914], "confidence": 0.95}, …     of the median; less than 0.95 with few rounds
      ],
      "notes": ["…", …],
      "text": ["…", …],                       of some groups: more lines of the table
      "skipped": ["…", …]                     where something could not be measured here: what and why
    }

`low` and `high` are quartiles (error bars); spread and noisy are defined in `benchmarks.harness.paired`. A pair
compares two rows round by round: of / to for the kind "ratio", of − to in the group's unit for "difference". `rows`
and `pairs` may be empty.

A file holds one suite: {"suite": "throughput", "machine": {…}, "began": {…}, "ended": {…}, "groups": [group, …]}.
`began` and `ended` are the `circumstances` before and after its groups were measured. A group that `pytest benchmarks`
has measured has its own two besides, because the groups of a suite need not follow one another.
"""

import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks.harness import paired
from benchmarks.harness.paired import Samples, Summary, summarise
from common.cores import available_cores
from common.files import write_atomically

ROOT = Path(__file__).resolve().parents[2]
DIGITS = 5  # significant ones: more would be noise
WIDTH = 80  # columns of a terminal


def group(
    name: str,
    unit: str,
    samples: Samples,
    facts: dict[str, dict] | None = None,
    ratios: Iterable[tuple[str, str]] = (),
    differences: Iterable[tuple[str, str]] = (),
    notes: Iterable[str] = (),
) -> dict:
    """The record of one group.

    Args:
        samples: of `benchmarks.harness.paired.measure`.
        facts: of each row, what else to keep.
        ratios, differences: the pairs (of, to) of rows to compare. A pair is left out where a row was not measured,
            because a user may have selected only some rows of a group.
        notes: sentences for the reader.
    """
    rows = {}
    for row, own in samples.items():
        summary = summarise(own)
        measured = {"noisy": summary.noisy, "samples": [rounded(sample) for sample in own]}
        rows[row] = (facts or {}).get(row, {}) | _numbers(summary) | measured
    pairs = []
    for kind, compared, compare in (
        ("ratio", ratios, paired.ratios),
        ("difference", differences, paired.differences),
    ):
        for of, to in compared:
            if of in samples and to in samples:
                pairs.append({"of": of, "to": to, "kind": kind} | _paired(compare(samples[of], samples[to])))
    return {
        "group": name,
        "unit": unit,
        "rounds": max(map(len, samples.values()), default=0),
        "rows": rows,
        "pairs": pairs,
        "notes": list(notes),
    }


def _paired(by_round: list[float]) -> dict:
    interval = paired.bootstrap(by_round)
    return _numbers(summarise(by_round)) | {
        "interval": [rounded(interval.low), rounded(interval.high)],
        "confidence": rounded(paired.confidence(len(by_round))),
    }


def _numbers(summary: Summary) -> dict:
    return {
        "median": rounded(summary.median),
        "low": rounded(summary.low),
        "high": rounded(summary.high),
        "spread": rounded(summary.spread),
    }


def rounded(number: float) -> float:
    return float(f"{number:.{DIGITS}g}")


def table(record: dict) -> str:
    """The group in at most 80 columns: rows with median, quartiles and spread, then pairs, then notes, folded."""
    lines = [record["group"]]
    if record["rows"]:
        unit = f"{record['unit']}, medians of {record['rounds']} rounds"
        lines.append(f"  {unit:<40}{'median':>10}{'quartiles':>17}{'spread':>8}")
    for name, row in record["rows"].items():
        quartiles = f"{number(row['low'])} – {number(row['high'])}"
        noisy = " *" if row["noisy"] else ""
        lines.append(f"  {name:<40}{number(row['median']):>10}{quartiles:>17}{row['spread']:>8.1%}{noisy}")
    for pair in record["pairs"]:
        sign = "/" if pair["kind"] == "ratio" else "−"
        shown = "{:.3f}".format if sign == "/" else number
        median = shown(pair["median"])
        low, high = map(shown, pair["interval"])
        left = f"  {pair['of']} {sign} {pair['to']}"
        right = f"{median} ({low} to {high})"
        lines.append(f"{left} {right:>{max(0, WIDTH - 1 - len(left))}}")
    if any(row["noisy"] for row in record["rows"].values()):
        lines.append("  * noisy: a spread over 15 %")
    lines += record.get("text", [])
    for note in record["notes"]:
        lines += textwrap.wrap(note, WIDTH, break_on_hyphens=False)
    return "\n".join(lines)


def number(value: float) -> str:
    """Four digits, three below 1, without an exponent for anything that a table holds."""
    size = abs(value)
    if size >= 1000:
        return f"{value:.0f}"
    return f"{value:.4g}" if size >= 1 else f"{value:.3g}"


def write(folder: Path, suite: str, groups: list[dict], began: dict, ended: dict | None = None) -> dict:
    """Write one suite's file into `folder`, complete or not at all; returns its content.

    Args:
        began: the `circumstances` before it was measured.
        ended: those after it was measured; by default those of now.
    """
    ended = ended or circumstances()
    record = {"suite": suite, "machine": machine(), "began": began, "ended": ended, "groups": groups}
    write_json(folder / f"{suite}.json", record)
    return record


def write_json(path: Path, content: dict) -> None:
    """Write a file for people and programs, complete or not at all."""
    write_atomically(path, json.dumps(content, indent=1) + "\n")


def why_not_writable(folder: Path) -> str | None:
    """The reason why no file can be written into `folder`, which is made if it is not there; None if one can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return f"nothing can be written to {folder}: {error.strerror}"


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


def circumstances() -> dict:
    """Circumstances of a recording: they differ from run to run, and so are no part of the machine."""
    load = os.getloadavg() if hasattr(os, "getloadavg") else None
    return {
        "commit": commit(ROOT),
        "command": _command(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "load": [round(value, 2) for value in load] if load else None,
    }


def commit(root: Path) -> str | None:
    """The commit of a repository, with "-dirty" if a tracked file differs from it; None where git does not say.

    The results do not count: a recording into them would make the next one look as though the code had been changed.
    """
    git = ("git", "--no-optional-locks", "-C", str(root))
    name = _output(*git, "describe", "--always", "--abbrev=12")
    if name is None:
        return None
    changed = _output(*git, "status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
    return f"{name}-dirty" if changed else name


def _command() -> str:
    """The command that a user typed, without the folders of this machine."""
    program = [Path(sys.argv[0]).name]
    started_as = sys.modules["__main__"].__spec__
    if started_as:
        program = ["python", "-m", started_as.name.removesuffix(".__main__")]
    for argument in sys.argv[1:]:
        path = Path(argument)
        program.append(path.name if path.is_absolute() else argument)
    return shlex.join(program)


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
