"""A diff of two rungs in a terminal: as wide as the terminal is, and colour where it is wanted."""

import os
from itertools import groupby
from typing import NamedTuple, TextIO

from common.ladder.alignment import Piece, marked, rows
from common.ladder.diffs import CONTEXT, Hunk, changed_lines, diff

SIGN_WIDTH = 2  # "+ "
RED = "\x1b[31m"
GREEN = "\x1b[32m"
DIM = "\x1b[2m"
STRONG = "\x1b[1;7m"
END = "\x1b[0m"
COLOUR_OF_SIGN = {"-": RED, "+": GREEN, " ": ""}


class Stretch(NamedTuple):
    """The part of a line that stands on one row of the terminal."""

    indent: str
    start: int
    end: int


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
    """One line of a file on as many rows as it needs."""
    text = "".join(piece.text for piece in pieces)
    marks = [piece.changed for piece in pieces for _ in piece.text]
    shown = []
    for indent, start, end in _stretches(text, width):
        prefix = f"{sign} {indent}"
        row = _row(prefix, text[start:end], marks[start:end], colour)
        shown.append(row.rstrip())
    return shown


def _stretches(text: str, width: int) -> list[Stretch]:
    """Where a line is cut between words to fit; what does not fit on the first row stands four columns deeper."""
    margin = len(text) - len(text.lstrip())
    stretches = []
    indent = ""
    start = 0
    earliest = margin + 1  # a cut before the first word would leave an empty row
    while True:
        room = width - SIGN_WIDTH - len(indent)
        end = _cut(text, start, earliest, room)
        stretches.append(Stretch(indent, start, end))
        start = end
        if text.startswith(" ", start):
            start += 1
        if start >= len(text):
            return stretches
        indent = " " * (margin + 4)
        earliest = start + 1


def _cut(text: str, start: int, earliest: int, room: int) -> int:
    """Where the row that begins at `start` ends: at the last space that leaves it short enough, or where it is full."""
    if len(text) - start <= room:
        return len(text)
    space = text.rfind(" ", earliest, start + room + 1)
    return space if space > 0 else start + room


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
