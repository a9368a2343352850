"""Rows of a side-by-side diff: similar lines beside each other, with the words that differ.

`difflib` compares here, but its own views (`ndiff`, `HtmlDiff`) do not: they pair lines from a similarity of 0.75 on,
which leaves a call with other arguments alone, and mark letters, which cuts a name that changes into pieces.
"""

import difflib
import re
from dataclasses import dataclass
from typing import NamedTuple

from common.ladder.diffs import Hunk

ALIKE = 0.6  # from this similarity on, two lines stand side by side


@dataclass(frozen=True)
class Row:
    """A line of one file beside the line of the other that takes its place; None where nothing does."""

    before: str | None
    after: str | None


class Piece(NamedTuple):
    """A part of a line, and whether it differs from the line beside it."""

    text: str
    changed: bool


class MarkedRow(NamedTuple):
    """Both lines of a row in pieces."""

    before: list[Piece]
    after: list[Piece]


def rows(hunk: Hunk) -> list[Row]:
    """The lines of a hunk side by side, so that what stands together is as similar as the order of lines allows."""
    old = hunk.before
    new = hunk.after
    if hunk.kind == "equal":
        return [Row(line, line) for line in old]
    alike = [[_similarity(line, other) for other in new] for line in old]
    best = _best_sums(alike, len(old), len(new))
    result = []
    i = j = 0
    while i < len(old) and j < len(new):
        if alike[i][j] and best[i][j] == best[i + 1][j + 1] + alike[i][j]:
            result.append(Row(old[i], new[j]))
            i += 1
            j += 1
        elif best[i][j] == best[i + 1][j]:
            result.append(Row(old[i], None))
            i += 1
        else:
            result.append(Row(None, new[j]))
            j += 1
    result += [Row(line, None) for line in old[i:]]
    result += [Row(None, line) for line in new[j:]]
    return result


def _similarity(line: str, other: str) -> float:
    matcher = difflib.SequenceMatcher(None, line.strip(), other.strip(), autojunk=False)
    ratio = matcher.ratio()
    return ratio if ratio >= ALIKE else 0.0


def _best_sums(alike: list[list[float]], old: int, new: int) -> list[list[float]]:
    """At [i][j]: the highest sum of similarities that pairs of lines i… of the old and j… of the new can have."""
    best = [[0.0] * (new + 1) for _ in range(old + 1)]
    for i in reversed(range(old)):
        for j in reversed(range(new)):
            paired = best[i + 1][j + 1] + alike[i][j]
            best[i][j] = max(best[i + 1][j], best[i][j + 1], paired)
    return best


def marked(row: Row) -> MarkedRow:
    """Both lines of a row, cut where they differ from each other; a line that stands alone is one piece."""
    if row.before is None or row.after is None:
        return MarkedRow(
            before=[Piece(row.before or "", changed=False)],
            after=[Piece(row.after or "", changed=False)],
        )
    ours = _words(row.before)
    theirs = _words(row.after)
    matcher = difflib.SequenceMatcher(None, ours, theirs, autojunk=False)
    result = MarkedRow([], [])
    for kind, start, end, other_start, other_end in matcher.get_opcodes():
        changed = kind != "equal"
        if end > start:
            text = "".join(ours[start:end])
            result.before.append(Piece(text, changed))
        if other_end > other_start:
            text = "".join(theirs[other_start:other_end])
            result.after.append(Piece(text, changed))
    return result


def _words(line: str) -> list[str]:
    """The line cut into words, spaces and single signs."""
    return re.findall(r"\w+|\s+|.", line)
