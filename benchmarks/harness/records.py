"""Records of benchmarks: what suites write as JSON, and what tables and pictures are made of.

A file holds one suite: {"suite": "throughput", "machine": {…}, "began": {…}, "ended": {…}, "groups": [group, …]}.
`machine` is the `hardware_and_versions` of `benchmarks.harness.machine`, and `began` and `ended` are its `run_metadata`
before and after the suite was measured, with the load before all suites. `benchmarks.suites.sharing` has "rows" of
bytes in place of the groups. A group is rows that take turns, and how they compare:

    {
      "group": "strong scaling: global batch 64, shared by all workers", "unit": "images/s", "rounds": 6,
      "rows": {"02_ddp_raw, 2 processes": {"median": 719.4, …, "samples": [719.1, …], "level": "02_ddp_raw", …}, …},
      "pairs": [{"of": "02_ddp_raw, 2 processes", "to": "00_single_gpu", "kind": "ratio", "median": 0.902, …}, …]
    }

`group` makes it from samples. Tables and pictures are made from records alone, and read it as a Group.
"""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from benchmarks.harness import paired
from benchmarks.harness.paired import Interval, Samples, Summary, summarise
from common.errors import fail
from common.files import write_atomically

SIGNIFICANT_DIGITS = 5


class Pair(NamedTuple):
    """Two rows that are compared round by round: of / to for the kind "ratio", of − to for the kind "difference"."""

    of: str
    to: str
    kind: Literal["ratio", "difference"]


def group(
    title: str, unit: str, samples: Samples, facts: dict[str, dict] | None = None, pairs: Sequence[Pair] = ()
) -> dict:
    """The record of one group, from the samples of `take_turns`; `facts` are what else to keep of each row."""
    rows = {}
    for row, values in samples.items():
        summary = summarise(values)
        rows[row] = {
            **(facts[row] if facts else {}),
            **rounded_fields(summary),
            "noisy": summary.noisy,
            "samples": [rounded(value) for value in values],
        }
    compared = []
    for pair in pairs:
        if pair.kind == "ratio":
            by_round = paired.ratios(samples[pair.of], samples[pair.to])
        else:
            by_round = [of - to for of, to in zip(samples[pair.of], samples[pair.to], strict=True)]
        interval = paired.interval_of_median(by_round)
        measured = {
            **pair._asdict(),
            **rounded_fields(summarise(by_round)),
            "interval": [rounded(interval.low), rounded(interval.high)],
            "confidence": rounded(interval.confidence),
        }
        compared.append(measured)
    rounds = len(next(iter(samples.values())))
    return {"group": title, "unit": unit, "rounds": rounds, "rows": rows, "pairs": compared}


class Row(NamedTuple):
    """The samples of a row, one a round; `facts` are its whole record, in which suites have keys of their own."""

    summary: Summary
    samples: list[float]
    facts: dict[str, Any]


class Comparison(NamedTuple):
    """A Pair, the summary of its ratios or differences, and the interval of their median."""

    pair: Pair
    summary: Summary
    interval: Interval


@dataclass(frozen=True)
class Group:
    """Rows that took turns, by their names, and how they compare; `facts` are as those of a Row."""

    title: str
    unit: str
    rounds: int
    rows: dict[str, Row]
    comparisons: list[Comparison]
    facts: dict[str, Any]

    def compared_with(self, row: str) -> dict[str, Comparison]:
        """How other rows compare with this one, by their names."""
        return {found.pair.of: found for found in self.comparisons if found.pair.to == row}


def read_group(record: dict) -> Group:
    rows = {name: Row(_summary(row), row["samples"], facts=row) for name, row in record["rows"].items()}
    comparisons = []
    for found in record["pairs"]:
        pair = Pair(found["of"], found["to"], found["kind"])
        interval = Interval(*found["interval"], found["confidence"])
        comparisons.append(Comparison(pair, _summary(found), interval))
    return Group(record["group"], record["unit"], record["rounds"], rows, comparisons, facts=record)


def _summary(record: dict) -> Summary:
    return Summary(*(record[name] for name in Summary._fields))


def rounded_fields(summary: Summary) -> dict[str, float]:
    return {name: rounded(value) for name, value in summary._asdict().items()}


def totals(devices: list[dict[str, int]]) -> list[int]:
    """The bytes of each device in a row of memory, of which a record has the bytes by category."""
    return [sum(split.values()) for split in devices]


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
