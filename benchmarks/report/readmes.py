"""Writes the generated parts of the pages: diffs and lists from here, tables of results from `page_tables`.

python -m benchmarks.report.readmes

Run it when a script, a pitfall or a record has changed. A part stands between two comments that no reader sees,
`<!-- NAME ARGUMENTS -->` and `<!-- /NAME -->`; NAME is one of PARTS. All other text is written by hand and stays.
"""

import argparse
import difflib
import re
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.report import page_tables
from common import ladder, pitfalls

PART = re.compile(r"^<!-- (\w+)( [^\n]*)? -->\n(.*?)^<!-- /\1 -->$", re.MULTILINE | re.DOTALL)


def readmes() -> list[Path]:
    pages = []
    for path in sorted(ladder.ROOT.rglob("*.md")):
        is_hidden = any(folder.startswith(".") for folder in path.relative_to(ladder.ROOT).parts)
        if not is_hidden and PART.search(path.read_text()):
            pages.append(path)
    return pages


def renewed(text: str) -> str:
    """The text of a page with its parts as they should be."""

    def part(match: re.Match) -> str:
        name = match[1]
        arguments = match[2] or ""
        return f"<!-- {name}{arguments} -->\n{PARTS[name](*arguments.split())}\n<!-- /{name} -->"

    return PART.sub(part, text)


def diff(before: str, after: str, with_old: bool = True) -> str:
    """All lines that change from one script to another, but for imports, blank lines and the docstrings on top.

    `with_old`: also show the lines that are removed.
    """
    ours = ladder.lines_below_docstring(ladder.find_script(before))
    theirs = ladder.lines_below_docstring(ladder.find_script(after))
    # Blank lines are equal everywhere, so they must not align two files.
    changes = difflib.SequenceMatcher(lambda line: not line.strip(), ours, theirs, autojunk=False).get_opcodes()
    if changes[-1][0] == "equal":
        changes.pop()  # nothing changes after it
    lines = []
    for kind, start, end, other_start, other_end in changes:
        if kind == "equal":
            # All of up to three shared lines, of more the first and the last.
            shared = _marked("  ", theirs[other_start:other_end])
            lines += shared if len(shared) <= 3 else [shared[0], "  …", shared[-1]]
            continue
        if with_old:
            lines += _marked("- ", ours[start:end])
        lines += _marked("+ ", theirs[other_start:other_end])
    return "\n".join(["```diff", *lines, "```"])


def _marked(sign: str, lines: list[str]) -> list[str]:
    return [sign + line for line in lines if line.strip() and not line.startswith(("import ", "from "))]


def mistakes(level: str) -> str:
    """The pitfalls whose place is this level's page, each with what it is."""
    names = [name for name in pitfalls.NAMES if pitfalls.PITFALLS[name].level == ladder.find_script(level)]
    items = []
    for name in names:
        symptom = pitfalls.PITFALLS[name].symptom
        loud = "" if symptom == "silent" else f" ({symptom})"
        items.append(f"- [`{name}`](../common/pitfalls/{name}.py){loud}: {pitfalls.title(name)}")
    return "\n".join(textwrap.fill(item, 80, subsequent_indent="  ", break_on_hyphens=False) for item in items)


PARTS: dict[str, Callable[..., str]] = {
    "diff": diff,
    "added": partial(diff, with_old=False),  # where most of the old lines are removed
    "mistakes": mistakes,
    "comparison": page_tables.text_of_comparison,
    "five_levels": page_tables.table_of_levels,
    "epoch": page_tables.table_of_epoch,
    "devices": page_tables.table_of_devices,
    "memory_split": page_tables.table_of_categories,
    "smaller": page_tables.table_of_smaller_memory,
    "break_even": page_tables.table_of_links,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report.readmes", description=__doc__.splitlines()[0])
    parser.parse_args()
    for path in readmes():
        before = path.read_text()
        text = renewed(before)
        if text != before:
            path.write_text(text)
            print(f"{path.relative_to(ladder.ROOT)} is written again")


if __name__ == "__main__":
    main()
