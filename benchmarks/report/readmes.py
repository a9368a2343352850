"""The generated parts of the pages: of the ladder's scripts here, of recorded results by `page_tables`.

python -m benchmarks.report.readmes

Run it after a change of these. A part stands between two comments that no reader sees, `<!-- NAME ARGUMENTS -->` and
`<!-- /NAME -->`; NAME is one of PARTS. What stands around it is written by hand and stays.
"""

import argparse
import re
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.report import page_tables
from common import ladder, pitfalls
from common.ladder import diffs

PART = re.compile(r"^<!-- (\w+)( [^\n]*)? -->\n(.*?)^<!-- /\1 -->$", re.MULTILINE | re.DOTALL)


def readmes() -> list[Path]:
    """The pages that have generated parts."""
    pages = []
    for path in sorted(ladder.ROOT.rglob("*.md")):
        is_hidden = any(folder.startswith(".") for folder in path.relative_to(ladder.ROOT).parts)
        if not is_hidden and PART.search(path.read_text()):
            pages.append(path)
    return pages


def renewed(text: str) -> str:
    """The text of a page with its parts as they should be.

    Raises:
        ValueError: if there is no such part, or no such script.
    """

    def part(match: re.Match) -> str:
        name = match[1]
        arguments = match[2] or ""
        if name not in PARTS:
            raise ValueError(f"there is no part {name!r}: one of {', '.join(PARTS)}")
        return f"<!-- {name}{arguments} -->\n{PARTS[name](*arguments.split())}\n<!-- /{name} -->"

    return PART.sub(part, text)


def diff(before: str, after: str, with_old: bool = True) -> str:
    """All lines that change from one script to another, but for imports, blank lines and the docstrings on top.

    `with_old`: show the lines that go, too.
    """
    hunks = diffs.diff(ladder.named(before), ladder.named(after))
    if hunks[-1].kind == "equal":
        hunks.pop()  # nothing changes after it
    lines = []
    for hunk in hunks:
        if hunk.kind == "equal":
            lines += _shared(hunk.after)
            continue
        if with_old:
            lines += _marked("- ", hunk.before)
        lines += _marked("+ ", hunk.after)
    return "\n".join(["```diff", *lines, "```"])


def _marked(sign: str, lines: tuple[str, ...]) -> list[str]:
    return [sign + line for line in lines if line.strip() and not line.startswith(("import ", "from "))]


def _shared(lines: tuple[str, ...]) -> list[str]:
    """The first and the last of some equal lines."""
    shared = _marked("  ", lines)
    return shared if len(shared) <= 3 else [shared[0], "  …", shared[-1]]


# What a level does for its reader, and what the reader has to know for it.
GIVES_AND_ASKS = {
    "00_single_gpu": ("–", "the training loop"),
    "01_data_parallel": ("cuts and joins batches", "what device 0 holds"),
    "02_ddp_raw": ("averages gradients", "ranks, shards, collectives"),
    "03_accelerate": ("ranks and collectives", "what `prepare` changes"),
    "04_trainer": ("the loop", "its defaults, its callbacks"),
}


def lines() -> str:
    """A table of the levels: how long each script is, what it does for its reader and asks of them."""
    rows = ["| level | lines | it does for you | you now have to know |", "|---|--:|---|---|"]
    for level in ladder.LEVELS:
        gives, asks = GIVES_AND_ASKS[level]
        rows.append(f"| [{level}] | {len(ladder.code_lines(level))} | {gives} | {asks} |")
    return "\n".join(rows)


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
    "diff": diff,
    "added": partial(diff, with_old=False),  # where most of the old lines go
    "lines": lines,
    "mistakes": mistakes,
    "comparison": page_tables.comparison,
    "five_levels": page_tables.five_levels,
    "epoch": page_tables.epoch,
    "devices": page_tables.devices,
    "memory_split": page_tables.memory_split,
    "smaller": page_tables.smaller,
    "break_even": page_tables.break_even,
}


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m benchmarks.report.readmes", description=__doc__.splitlines()[0]
    ).parse_args()
    for path in readmes():
        page = path.relative_to(ladder.ROOT)
        before = path.read_text()
        try:
            text = renewed(before)
        except ValueError as error:
            sys.exit(f"error: {page}: {error}")
        if text != before:
            path.write_text(text)
            print(f"{page} is written again")


if __name__ == "__main__":
    main()
