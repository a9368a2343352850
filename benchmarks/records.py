"""What a benchmark leaves behind: one dict per group of rows, to write as JSON, to print and to plot.

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
         "median": 0.902, "low": 0.893, "high": 0.911, "spread": 0.02}, …
      ],
      "notes": ["…", …],
      "skipped": ["…", …]                     where something could not be measured here: what and why
    }

`low` and `high` are quartiles (error bars); spread and noisy are defined in `benchmarks.paired`. A pair compares two
rows round by round: of / to for the kind "ratio", of − to in the group's unit for "difference". `rows` and `pairs` may
be empty.

A file holds one suite: {"suite": "throughput", "machine": {…}, "groups": [group, …]}.
"""

import json
import platform
import textwrap
from collections.abc import Iterable
from pathlib import Path

import torch

from benchmarks.paired import Samples, Summary, paired_difference, paired_ratio, summarise
from common.accelerator.state import available_cores

DIGITS = 5  # significant ones: more would be noise


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
        samples: of `benchmarks.paired.measure`.
        facts: of each row, what else to keep.
        ratios, differences: the pairs (of, to) of rows to compare.
        notes: sentences for the reader.

    Raises:
        ValueError: if a fact bears the name of one of the measured values.
    """
    facts = facts or {}
    pairs = [("ratio", paired_ratio, pair) for pair in ratios]
    pairs += [("difference", paired_difference, pair) for pair in differences]
    return {
        "group": name,
        "unit": unit,
        "rounds": max(map(len, samples.values()), default=0),
        "rows": {row: _row(own, facts.get(row, {})) for row, own in samples.items()},
        "pairs": [
            {"of": of, "to": to, "kind": kind} | _numbers(compare(samples[of], samples[to]))
            for kind, compare, (of, to) in pairs
        ],
        "notes": list(notes),
    }


def _row(samples: list[float], facts: dict) -> dict:
    summary = summarise(samples)
    row = _numbers(summary) | {"noisy": summary.noisy, "samples": [rounded(sample) for sample in samples]}
    if taken := row.keys() & facts.keys():
        raise ValueError(f"{', '.join(sorted(taken))} of a row cannot be a fact too")
    return row | facts


def _numbers(summary: Summary) -> dict:
    return {name: rounded(getattr(summary, name)) for name in ("median", "low", "high", "spread")}


def rounded(number: float) -> float:
    return float(f"{number:.{DIGITS}g}")


def table(record: dict) -> str:
    """The group in at most 80 columns: rows with median, quartiles and spread, then pairs, then notes, folded."""
    lines = [record["group"]]
    if record["rows"]:
        rounds = f"medians of {record['rounds']} rounds" if record["rounds"] > 1 else "a single round"
        lines.append(f"  {record['unit'] + ', ' + rounds:<40}{'median':>10}{'quartiles':>17}{'spread':>8}")
    for name, row in record["rows"].items():
        lines.append(f"  {name:<40}{number(row['median']):>10}")
        if record["rounds"] > 1:
            quartiles = f"{number(row['low'])} – {number(row['high'])}"
            lines[-1] += f"{quartiles:>17}{row['spread']:>8.1%}{' *' if row['noisy'] else ''}"
    lines += [_pair_line(pair) for pair in record["pairs"]]
    if any(row["noisy"] for row in record["rows"].values()):
        lines.append("  * noisy: a spread over 15 %")
    lines += [line for note in record["notes"] for line in textwrap.wrap(note, 80, break_on_hyphens=False)]
    return "\n".join(lines)


def _pair_line(pair: dict) -> str:
    ratio = pair["kind"] == "ratio"
    middle, low, high = (f"{pair[key]:.3f}" if ratio else f"{pair[key]:.3g}" for key in ("median", "low", "high"))
    left, right = f"  {pair['of']} {'/' if ratio else '−'} {pair['to']}", f"{middle} ({low} to {high})"
    return f"{left} {right:>{max(0, 79 - len(left))}}"


def number(value: float) -> str:
    """Four digits, three below 1, without an exponent for anything that a table holds."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.{4 if abs(value) >= 1 else 3}g}"


def write(path: Path, suite: str, groups: list[dict]) -> None:
    """Write one suite's file, complete or not at all."""
    draft = path.with_name(f".{path.name}")
    draft.write_text(json.dumps({"suite": suite, "machine": machine(), "groups": groups}, indent=1) + "\n")
    draft.replace(path)


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


def _processor() -> str:
    """The processor's name where Linux tells it, else its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
