"""The generated parts of the pages: diffs of levels, line counts, recorded numbers.

python -m benchmarks.report.readmes
python -m benchmarks.report.readmes --check

Run it after a change of these. A part stands between two comments that no reader sees, `<!-- NAME ARGUMENTS -->` and
`<!-- /NAME -->`; NAME is one of PARTS, or "diff", "added" or "unshown". What stands around it is written by hand and
stays. The parts `diff BEFORE AFTER: ANCHOR` (new lines and old ones), `added …` (new lines only) and `unshown …` (none)
of a page divide the diff of two scripts among them, as `divided_diffs` describes.
"""

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.report import course, table
from benchmarks.report.divided_diffs import KINDS, Drift, divided
from benchmarks.report.verdicts import peaks
from benchmarks.suites import memory
from benchmarks.suites.throughput import ALL_CORES, FIRST
from common import ladder, pitfalls
from common.instruments.result import quantity, result_line
from common.ladder import scripts

RESULTS = ladder.ROOT / "benchmarks" / "results" / "amd-epyc-2-cores"
PART = re.compile(r"^<!-- (\w+)( [^\n]*)? -->\n(.*?)^<!-- /\1 -->$", re.MULTILINE | re.DOTALL)


class DiffArguments(NamedTuple):
    """The arguments behind the name of a part of a diff."""

    before: str
    after: str
    anchor: str


def readmes() -> list[Path]:
    """The pages that have generated parts."""
    pages = []
    for path in sorted(scripts.ROOT.rglob("*.md")):
        is_hidden = any(folder.startswith(".") for folder in path.relative_to(scripts.ROOT).parts)
        if not is_hidden and PART.search(path.read_text()):
            pages.append(path)
    return pages


def renewed(text: str) -> str:
    """The text of a README with its parts as they should be.

    Raises:
        Drift: if the README has a part that cannot be written.
    """
    blocks = _diff_blocks(text)

    def part(match: re.Match) -> str:
        name = match[1]
        arguments = match[2] or ""
        if name in KINDS:
            content = blocks[diff_arguments(arguments)]
        elif name in PARTS:
            content = PARTS[name](*arguments.split())
        else:
            raise Drift(f"there is no part {name!r}: one of {', '.join([*KINDS, *PARTS])}")
        lines = f"{content}\n" if content else ""
        return f"<!-- {name}{arguments} -->\n{lines}<!-- /{name} -->"

    return PART.sub(part, text)


def diff_arguments(text: str) -> DiffArguments:
    """The arguments of a part such as "diff BEFORE AFTER: ANCHOR".

    Raises:
        Drift: if there is no such script.
    """
    pair, _, anchor = text.strip().partition(": ")
    names = pair.split()
    if len(names) != 2:
        raise Drift(f"a diff is of two scripts, not of {pair!r}")
    try:
        return DiffArguments(ladder.named(names[0]), ladder.named(names[1]), anchor)
    except ValueError as error:
        raise Drift(str(error)) from error


def _diff_blocks(text: str) -> dict[DiffArguments, str]:
    """The text that each part of a diff in a page has to contain."""
    anchors: dict[tuple[str, str], dict[str, str]] = {}
    for name, arguments, _ in PART.findall(text):
        if name in KINDS:
            asked = diff_arguments(arguments)
            anchors.setdefault((asked.before, asked.after), {})[asked.anchor] = name
    blocks = {}
    for (before, after), of_pair in anchors.items():
        for anchor, block in divided(before, after, of_pair).items():
            blocks[DiffArguments(before, after, anchor)] = block
    return blocks


# What a level does for its reader, and what the reader has to know for it.
GIVES_AND_ASKS = {
    "00_single_gpu": ("–", "the training loop"),
    "01_data_parallel": ("cuts and joins batches", "what device 0 holds"),
    "02_ddp_raw": ("averages gradients", "ranks, shards, collectives"),
    "03_accelerate": ("ranks and collectives", "what `prepare` changes"),
    ladder.FULL: ("precision, resuming", "micro-batches, loss scale"),
    "04_trainer": ("the loop", "its defaults, its callbacks"),
}


def lines() -> str:
    """A table of the scripts: length, new lines, what each does for its reader and asks of them."""
    rows = [
        "| level | lines | new | it does for you | you now have to know |",
        "|---|--:|--:|---|---|",
        _line_counts(ladder.levels()[0], "–"),
    ]
    for before, rung in ladder.steps():
        rows.append(_line_counts(rung, ladder.changed_lines(before, rung).added))
    return "\n".join(rows)


def _line_counts(rung: str, added: int | str) -> str:
    name = f"[{rung}]" if rung in ladder.levels() else f"`{ladder.script(rung).name}`"
    gives, asks = GIVES_AND_ASKS[rung]
    return f"| {name} | {len(ladder.story(rung))} | {added} | {gives} | {asks} |"


def recorded(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def comparison() -> str:
    """The table of `python -m benchmarks.compare` as it was recorded, with the notes that explain its columns."""
    record = recorded("results")
    return f"```text\n{table.table(record)}\n\n{table.notes(record, with_account=False)}\n```"


def epoch(level: str) -> str:
    """The result that one epoch at this level printed, folded to the width of a terminal, and its cost in a line.

    One run alone says little about speed, so the run's own times are left out. The speed in the last line is that of
    the comparison's rounds, in which the levels took turns; the ratio is the median of the rounds' ratios.
    """
    result = recorded("results")["levels"][ladder.named(level)]
    accuracy, losses, _, steps_and_seconds = result_line(result["run"]).split(" | ")
    steps, _, _ = steps_and_seconds.partition(" in ")
    lines = [accuracy, f"    {losses} | {steps}", f"    {_cost(level)}"]
    if ladder.named(level) != ladder.levels()[0]:
        ratio = paired(recorded("results")["throughput"][0], ladder.named(level))
        lines.append(f"    {ratio:.2f} of level 00's speed, round by round")
    return "\n".join(f"    {line}" for line in lines)


def _cost(level: str) -> str:
    """The level's speed and memory in the recorded comparison."""
    record = recorded("results")
    name = ladder.named(level)
    result = record["levels"][name]
    fields = [_speed(record, name)] if name in table.timed(record) else []
    sizes = [f"{size / 2**20:.0f}" for size in peaks(result)]
    fields.append(f"peak {' and '.join(sizes)} MiB")
    return " | ".join(fields)


def _speed(record: dict, level: str) -> str:
    median = table.timed(record)[level]["median"]
    return f"{median:.0f} images/s, {quantity(record['cores_per_device'], 'core')} a device"


SLOW_LINK = "100 Mbit/s"


def does_ddp_pay() -> str:
    """A paragraph: where DDP pays, with the recorded speed-ups of two devices, and of two nodes over a slow link."""
    small, large = recorded("results")["throughput"]
    nodes = course.speed_up_of_two_nodes(SLOW_LINK, 64)["median"]
    text = (
        "**Does DDP pay?** DistributedDataParallel (DDP) trains with one process for each device, and the processes "
        "average their gradients in every step. It pays where a second device saves more time than averaging takes. "
        "[Recorded on two CPU cores][pays], where a device is one core, two devices are "
        f"{paired(small, '02_ddp_raw'):.1f} times as fast as one at a global batch of 64 images, and "
        f"{paired(large, '02_ddp_raw'):.1f} times at 256: the more there is to compute, the less averaging weighs. "
        f"Over a slow link DDP does not pay: two machines (here two halves of one) with {SLOW_LINK} between them and "
        f"64 images each train {nodes:.2f} times as many images per second as one machine alone. Nor does DDP pay on "
        "one CPU, where a single process can have all cores: that one is about as fast as two devices, "
        f"{all_cores(small):.2f} and {all_cores(large):.2f} times as fast as one. GPUs do not offer this choice; none "
        "was measured here."
    )
    return textwrap.fill(text, 80, break_on_hyphens=False)


def devices_compared() -> str:
    """A point of a list: which devices the recorded speeds compare."""
    record = recorded("results")
    point = (
        "- **The speeds** compare equal devices. Without GPUs a device is an equal part of the cores: level 00 has one "
        f"device, and the others have {record['world_size']}, as it would be with GPUs. DataParallel gains little, "
        "because a CPU computes the backward of all replicas on one thread. The last row is a choice that GPUs do not "
        "offer: one process with all cores is about as fast as two processes that share them."
    )
    return textwrap.fill(point, 80, subsequent_indent="  ", break_on_hyphens=False)


def paired(group: dict, level: str) -> float:
    """The level's throughput over level 00's: the median of the ratios of rounds that were run in turn."""
    to_first = [pair for pair in group["pairs"] if pair["to"] == FIRST]
    (ratio,) = [pair for pair in to_first if group["rows"][pair["of"]]["level"] == level]
    return ratio["median"]


def all_cores(group: dict) -> float:
    """The throughput of level 00 with all cores over its throughput on one device of several."""
    (ratio,) = [pair for pair in group["pairs"] if (pair["of"], pair["to"]) == (f"{FIRST}, {ALL_CORES}", FIRST)]
    return ratio["median"]


def devices() -> str:
    """Peak MiB of BasicNet's training on several devices, as a table."""
    lines = ["| devices | first | each of the others | ratio | DDP, each |", "|--:|--:|--:|--:|--:|"]
    data_parallel = _basic_net_rows("DataParallel")
    ddp = _basic_net_rows("DDP")
    for ours, theirs in zip(data_parallel, ddp, strict=True):
        first, *others = _mib(ours)
        fullest = max(others)
        each = max(_mib(theirs))
        ratio = first / fullest
        lines.append(f"| {ours['devices']} | {first:.1f} | {fullest:.1f} | {ratio:.1f} | {each:.1f} |")
    return "\n".join(lines)


def _basic_net_rows(wrapper: str) -> list[dict]:
    rows = [row for row in recorded("results")["memory"] if row["network"] == "basic_net"]
    return [row for row in rows if row["wrapper"] == wrapper and row["devices"] > 1]


def _mib(row: dict) -> list[float]:
    return [size / 2**20 for size in memory.totals(row)]


def mistakes(level: str) -> str:
    """The pitfalls whose place is this level's page, each with what it is."""
    own = [name for name in pitfalls.NAMES if pitfalls.place(name) == ladder.named(level)]
    items = []
    for name in own:
        symptom = pitfalls.symptom(name)
        loud = "" if symptom == "silent" else f" ({symptom})"
        items.append(f"- [`{name}`](../common/pitfalls/{name}.py){loud}: {pitfalls.title(name)}")
    return "\n".join(textwrap.fill(item, 80, subsequent_indent="  ", break_on_hyphens=False) for item in items)


PARTS: dict[str, Callable[..., str]] = {
    "lines": lines,
    "comparison": comparison,
    "epoch": epoch,
    "does_ddp_pay": does_ddp_pay,
    "devices_compared": devices_compared,
    "devices": devices,
    "collectives": course.collectives,
    "ring": course.ring,
    "latency": course.latency,
    "overlap": course.overlap,
    "no_sync": course.no_sync,
    "break_even": course.break_even,
    "memory_split": course.memory_split,
    "memory_tensors": course.memory_tensors,
    "smaller": course.smaller,
    "interpreter_lock": course.interpreter_lock,
    "zero": course.zero,
    "zero_split": course.zero_split,
    "tails": course.tails,
    "mistakes": mistakes,
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report.readmes", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 where a part has drifted")
    options = parser.parse_args(argv)
    drifted = [path for path in readmes() if _has_drifted(path)]
    for path in drifted:
        name = path.relative_to(scripts.ROOT)
        if options.check:
            print(f"{name} has drifted")
        else:
            path.write_text(renewed(path.read_text()))
            print(f"{name} is written again")
    if drifted and options.check:
        sys.exit("python -m benchmarks.report.readmes writes the pages again")


def _has_drifted(path: Path) -> bool:
    """Are a README's parts other than they should be? The program ends where one cannot be written."""
    text = path.read_text()
    try:
        return renewed(text) != text
    except Drift as error:
        sys.exit(f"error: {path.relative_to(scripts.ROOT)}: {error}")


if __name__ == "__main__":
    main()
