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
`machine` is the `hardware_and_versions` of `benchmarks.harness.machine`, and `began` and `ended` are its `run_metadata`
before and after the suite was measured. `benchmarks.suites.sharing` has "rows" in place of the groups, which
`benchmarks.report.group_table.tables` prints.
"""

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path

from benchmarks.harness import paired
from benchmarks.harness.paired import Samples, Summary, summarise
from common.errors import fail
from common.files import write_atomically

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
    metadata = metadata or {}
    rows = {}
    for row, values in samples.items():
        summary = summarise(values)
        measured = {"noisy": summary.noisy, "samples": [rounded(value) for value in values]}
        rows[row] = metadata.get(row, {}) | _numbers(summary) | measured
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
    """Make `folder`, if needed, and a file in it. Raises UserError, which names the flag, if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        fail(f"{flag}: nothing can be written to {folder}: {error.strerror}")
