"""The generated parts of the READMEs: diffs of levels, line counts, recorded numbers.

python -m benchmarks.readmes
python -m benchmarks.readmes --check

Run it after a change of these. A part stands between two comments that no reader sees, `<!-- NAME ARGUMENTS -->` and
`<!-- /NAME -->`; NAME is "diff" or one of PARTS. What stands around it is written by hand and stays. The parts
`diff BEFORE AFTER: ANCHOR` of a README divide the diff of two levels among them: each begins with the change that
contains ANCHOR, and goes on to where the next begins. So every sentence beside a part stays with the lines that it is
about, and no change can be left out.
"""

import argparse
import importlib
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import memory, report
from benchmarks.verdicts import peaks
from common import ladder, pitfalls
from common.report import result_line

RESULTS = ladder.ROOT / "benchmarks" / "results" / "amd-epyc-2-cores"
PART = re.compile(r"^<!-- (\w+)( [^\n]*)? -->\n(.*?)^<!-- /\1 -->$", re.MULTILINE | re.DOTALL)
CONTEXT = 1  # equal lines shown before and after a change
# What each level takes over from its reader, in the README's table.
HANDED_OVER = {
    "00_single_gpu": "–",
    "01_data_parallel": "how a batch is cut and joined",
    "02_ddp_raw": "how gradients are averaged",
    "03_accelerate": "ranks, shards, collectives",
    "04_trainer": "the loop",
}


class Drift(ValueError):
    """A README asks for something that the levels do not have."""


def readmes() -> list[Path]:
    """The READMEs that have generated parts."""
    found = [ladder.ROOT / "README.md", *(ladder.script(level).with_name("README.md") for level in ladder.levels())]
    return [path for path in found if PART.search(path.read_text())]


def renewed(text: str) -> str:
    """The text of a README with its parts as they should be. Raises Drift."""
    anchors: dict[tuple[str, str], list[str]] = {}
    for name, arguments, _ in PART.findall(text):
        if name == "diff":
            before, after, anchor = _diff_arguments(arguments)
            anchors.setdefault((before, after), []).append(anchor)
    shares = {pair: divided(*pair, found) for pair, found in anchors.items()}

    def part(match: re.Match) -> str:
        name, arguments = match[1], match[2] or ""
        if name == "diff":
            before, after, anchor = _diff_arguments(arguments)
            content = shares[before, after][anchor]
        elif name in PARTS:
            content = PARTS[name](*arguments.split())
        else:
            raise Drift(f"there is no part {name!r}: one of diff, {', '.join(PARTS)}")
        return f"<!-- {name}{arguments} -->\n{content}\n<!-- /{name} -->"

    return PART.sub(part, text)


def _diff_arguments(arguments: str) -> tuple[str, str, str]:
    levels, _, anchor = arguments.strip().partition(": ")
    before, after = map(ladder.named, levels.split())
    return before, after, anchor


def divided(before: str, after: str, anchors: list[str]) -> dict[str, str]:
    """The whole diff of two levels in as many blocks as there are anchors, by anchor. Raises Drift.

    Each anchor is part of a line that changes, and of one change only; the first belongs to the first change.
    """
    hunks = ladder.diff(before, after)
    starts = []
    for anchor in anchors:
        holds = [i for i, hunk in enumerate(hunks) if any(anchor in line for line in _changed(hunk))]
        if len(holds) != 1:
            raise Drift(f"{len(holds)} changes from {before} to {after} contain {anchor!r}; an anchor must be in one")
        starts += holds
    first = next(i for i, hunk in enumerate(hunks) if hunk.kind != "equal")
    if starts[0] != first or starts != sorted(set(starts)):
        raise Drift(f"the parts of the diff from {before} to {after} must begin with its first change and be in order")
    blocks = {}
    for anchor, start, end in zip(anchors, starts, [*starts[1:], len(hunks)], strict=True):
        last = max(i for i in range(start, end) if hunks[i].kind != "equal")
        blocks[anchor] = _block(hunks, start, last)
    return blocks


def _changed(hunk: ladder.Hunk) -> tuple[str, ...]:
    return () if hunk.kind == "equal" else hunk.before + hunk.after


def _block(hunks: list[ladder.Hunk], start: int, last: int) -> str:
    lines = [*_equal(hunks, start - 1, slice(-CONTEXT, None))]
    for hunk in hunks[start : last + 1]:
        if hunk.kind == "equal":
            shared = [line for line in hunk.after if line.strip()]
            folded = [f"  {line}" for line in shared[:CONTEXT]] + ["  …"] + [f"  {line}" for line in shared[-CONTEXT:]]
            lines += folded if len(shared) > 2 * CONTEXT + 1 else [f"  {line}" for line in shared]
        else:
            lines += [f"{sign} {line}" for sign, line in signed(hunk)]
    lines += _equal(hunks, last + 1, slice(0, CONTEXT))
    return "\n".join(["```diff", *lines, "```"])


def _equal(hunks: list[ladder.Hunk], i: int, which: slice) -> Iterator[str]:
    if 0 <= i < len(hunks):
        yield from (f"  {line}" for line in [line for line in hunks[i].after if line.strip()][which])


def signed(hunk: ladder.Hunk) -> Iterator[tuple[str, str]]:
    """The lines that go ("-") and that come ("+") in a change, without blank ones."""
    for sign, lines in (("-", hunk.before), ("+", hunk.after)):
        yield from ((sign, line) for line in lines if line.strip())


def lines() -> str:
    """How much each level's reader writes and knows, as a table."""
    rows = ["| level | lines | new | gone | what you no longer have to know |", "|---|--:|--:|--:|---|"]
    before = None
    for level in ladder.levels():
        added, removed = ladder.changed_lines(before, level) if before else ("–", "–")
        rows.append(f"| [{level}] | {len(ladder.story(level))} | {added} | {removed} | {HANDED_OVER[level]} |")
        before = level
    return "\n".join(rows)


def recorded(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def comparison() -> str:
    """The table of `python -m benchmarks.compare` as it was recorded."""
    record = recorded("results")
    return f"```text\n{report.table(record)}\n\n{report.notes(record)}\n```"


def epoch(level: str) -> str:
    """The result that one epoch at this level printed, folded to the width of a terminal."""
    fields = result_line(recorded("results")["levels"][ladder.named(level)]["run"]).split(" | ")
    return f"    {fields[0]}\n        " + " | ".join(fields[1:])


def numbers(level: str) -> str:
    """What the level gave and what it cost in the recorded comparison, in a line."""
    record, name, names = recorded("results"), ladder.named(level), ladder.levels()
    fields = []
    if name in report.timed(record):
        fields.append(f"{report.timed(record)[name]['median']:.0f} images/s")
        if name != names[0]:
            fields[0] += f", {paired(record, name):.2f} of level 00"
    fields.append(f"peak {' and '.join(f'{size / 2**20:.0f}' for size in peaks(record['levels'][name]))} MiB")
    if name != names[0]:
        added, removed = ladder.changed_lines(names[names.index(name) - 1], name)
        fields.append(f"{added} lines new, {removed} gone")
    return "    " + " | ".join(fields)


def paired(record: dict, level: str) -> float:
    """The level's throughput over level 00's: the median of the ratios of rounds that were run in turn."""
    group = record["throughput"][0]
    (ratio,) = [pair for pair in group["pairs"] if group["rows"][pair["of"]]["level"] == level]
    return ratio["median"]


def devices() -> str:
    """Peak MiB of BasicNet's training on several devices, as a table."""
    rows = [row for row in recorded("results")["memory"] if row["network"] == "basic_net" and row["devices"] > 1]
    pairs = zip(*([row for row in rows if row["wrapper"] == wrapper] for wrapper in memory.WRAPPERS), strict=True)
    lines = ["| devices | first | each other | ratio | DDP, each |", "|--:|--:|--:|--:|--:|"]
    for ours, theirs in pairs:
        first, *others = (size / 2**20 for size in memory.totals(ours))
        each = max(memory.totals(theirs)) / 2**20
        cells = [ours["devices"], f"{first:.1f}", f"{max(others):.1f}", f"{first / max(others):.1f}", f"{each:.1f}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def mistakes(level: str) -> str:
    """The pitfalls that belong to a level, each with what it is."""
    modules = {name: importlib.import_module(pitfalls.module_name(name)) for name in pitfalls.NAMES}
    own = [name for name, module in modules.items() if ladder.named(level) in module.LEVELS]
    items = [f"- [`{name}`](../common/pitfalls/{name}.py): {pitfalls.title(name)}" for name in own]
    return "\n".join(textwrap.fill(item, 80, subsequent_indent="  ", break_on_hyphens=False) for item in items)


PARTS: dict[str, Callable[..., str]] = {
    "lines": lines,
    "comparison": comparison,
    "epoch": epoch,
    "numbers": numbers,
    "devices": devices,
    "mistakes": mistakes,
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readmes", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 where a part has drifted")
    options = parser.parse_args(argv)
    drifted = False
    for path in readmes():
        name, text = path.relative_to(ladder.ROOT), path.read_text()
        try:
            new = renewed(text)
        except Drift as error:
            sys.exit(f"error: {name}: {error}")
        if new != text:
            drifted = True
            print(f"{name} has drifted" if options.check else f"{name} is written anew")
            if not options.check:
                path.write_text(new)
    if drifted and options.check:
        sys.exit("python -m benchmarks.readmes writes them anew")


if __name__ == "__main__":
    main()
