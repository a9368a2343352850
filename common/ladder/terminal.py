"""A diff of two rungs in a terminal: as wide as the terminal is, and colour where it is wanted."""

import os
import textwrap
from itertools import groupby
from typing import TextIO

from common.ladder.alignment import Piece, marked, rows
from common.ladder.diffs import CONTEXT, Hunk, changed_lines, diff

SIGN_WIDTH = 2  # "+ "
RED = "\x1b[31m"
GREEN = "\x1b[32m"
DIM = "\x1b[2m"
STRONG = "\x1b[1;7m"
END = "\x1b[0m"
COLOUR_OF_SIGN = {"-": RED, "+": GREEN, " ": ""}


def wants_colour(stream: TextIO) -> bool:
    """Is `stream` a terminal, and has the user not set NO_COLOR (https://no-color.org)?"""
    return stream.isatty() and not os.environ.get("NO_COLOR")


def diff_text(before: str, after: str, colour: bool, width: int = 80) -> str:
    """Removed and added lines, and some around them, in `width` columns; changed words stand out in colour."""
    changed = changed_lines(before, after)
    shown = [
        f"{before} → {after}: {changed.added} lines added, {changed.removed} removed",
        "without blank lines and the text on top of each file",
        "",
    ]
    hunks = diff(before, after)
    for hunk in hunks:
        if hunk.kind == "equal":
            shown += _equal(hunk, hunk is hunks[0], hunk is hunks[-1], colour, width)
        else:
            shown += _changed(hunk, colour, width)
    return "\n".join(shown) + "\n"


def _changed(hunk: Hunk, colour: bool, width: int) -> list[str]:
    side_by_side = rows(hunk)
    shown = []
    for row in side_by_side:
        if row.before is not None:
            shown += _line("-", marked(row).before, colour, width)
    for row in side_by_side:
        if row.after is not None:
            shown += _line("+", marked(row).after, colour, width)
    return shown


def _equal(hunk: Hunk, is_first: bool, is_last: bool, colour: bool, width: int) -> list[str]:
    """Equal lines; of many only those next to a change, and how many are left out."""
    lines = hunk.after
    if len(lines) <= 2 * CONTEXT + 1:
        return _equal_lines(lines, colour, width)
    head = () if is_first else lines[:CONTEXT]
    tail = () if is_last else lines[-CONTEXT:]
    hidden = len(lines) - len(head) - len(tail)
    mark = f"  ⋮ {hidden} equal lines"
    if colour:
        mark = f"{DIM}{mark}{END}"
    return [*_equal_lines(head, colour, width), mark, *_equal_lines(tail, colour, width)]


def _equal_lines(lines: tuple[str, ...], colour: bool, width: int) -> list[str]:
    shown = []
    for text in lines:
        shown += _line(" ", [Piece(text, changed=False)], colour, width)
    return shown


def _line(sign: str, pieces: list[Piece], colour: bool, width: int) -> list[str]:
    """One line of a file on as many rows as it needs; all but the first stand four columns deeper."""
    text = "".join(piece.text for piece in pieces)
    marks = [piece.changed for piece in pieces for _ in piece.text]
    code = text.lstrip()
    margin = text.removesuffix(code)
    deeper = margin + 4 * " "
    wrapper = textwrap.TextWrapper(width - SIGN_WIDTH, margin, deeper, break_on_hyphens=False)
    shown: list[str] = []
    end = 0
    for row in wrapper.wrap(code) or [""]:
        indent = deeper if shown else ""
        part = row.removeprefix(indent)
        start = text.index(part, end)  # the spaces at which the line was cut are left out
        end = start + len(part)
        shown.append(_row(f"{sign} {indent}", part, marks[start:end], colour).rstrip())
    return shown


def _row(prefix: str, text: str, marks: list[bool], colour: bool) -> str:
    """One row of the terminal; with `colour`, letters that are marked stand out."""
    if not colour:
        return prefix + text
    base = COLOUR_OF_SIGN[prefix[0]]
    painted = base + prefix
    letters = zip(marks, text, strict=True)
    for changed, run in groupby(letters, key=lambda letter: letter[0]):
        piece = "".join(letter for _, letter in run)
        painted += f"{STRONG}{piece}{END}{base}" if changed else piece
    return painted + END if base else painted
