"""Differences between two rungs of the ladder."""

import difflib
import re
from dataclasses import dataclass
from typing import NamedTuple

from common.ladder.scripts import docstring_end, file_name, source, story

CONTEXT = 3  # equal lines shown around a change


class ChangedLines(NamedTuple):
    """The numbers of the story's lines that a step adds and removes."""

    added: int
    removed: int


@dataclass(frozen=True)
class Hunk:
    """Consecutive lines that two files share ("equal"), or that differ ("replace", "delete", "insert")."""

    kind: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    before_number: int  # of the first line, counted from 1
    after_number: int


def changed_lines(before: str, after: str) -> ChangedLines:
    """The numbers of lines that a reader of `before` finds new in `after`, or gone; blank ones do not count."""
    matcher = difflib.SequenceMatcher(None, story(before), story(after), autojunk=False)
    added = removed = 0
    for kind, start, end, other_start, other_end in matcher.get_opcodes():
        if kind != "equal":
            removed += end - start
            added += other_end - other_start
    return ChangedLines(added, removed)


def diff(before: str, after: str, docstring: bool = False) -> list[Hunk]:
    """The changes from one script to another, in order, with all lines of both.

    Without `docstring` the module docstrings, of which every script has its own, and the blank lines after them are
    left out.
    """
    skipped_before = 0 if docstring else docstring_end(before)
    skipped_after = 0 if docstring else docstring_end(after)
    ours = source(before)[skipped_before:]
    theirs = source(after)[skipped_after:]
    matcher = difflib.SequenceMatcher(_is_blank, ours, theirs, autojunk=False)
    hunks = []
    for kind, start, end, other_start, other_end in matcher.get_opcodes():
        hunk = Hunk(
            kind,
            before=tuple(ours[start:end]),
            after=tuple(theirs[other_start:other_end]),
            before_number=skipped_before + start + 1,
            after_number=skipped_after + other_start + 1,
        )
        hunks.append(hunk)
    return hunks


def _is_blank(line: str) -> bool:
    """Blank lines are alike everywhere, and would tie together what does not belong together."""
    return not line.strip()


def unified(before: str, after: str) -> str:
    """The diff of two scripts as text, in the form of `diff -u`, without the module docstrings."""
    skipped_before = docstring_end(before)
    skipped_after = docstring_end(after)
    ours = source(before)[skipped_before:]
    theirs = source(after)[skipped_after:]
    names = (file_name(before), file_name(after))
    diff_lines = []
    for line in difflib.unified_diff(ours, theirs, *names, n=CONTEXT, lineterm=""):
        if line.startswith("@@ "):
            line = _in_whole_files(line, skipped_before, skipped_after)
        diff_lines.append(line)
    return "\n".join(diff_lines) + "\n"


def _in_whole_files(header: str, skipped_before: int, skipped_after: int) -> str:
    """A line such as "@@ -1,7 +1,9 @@" with the numbers that its lines have in the whole files."""
    numbers = re.fullmatch(r"@@ -(\d+)(.*) \+(\d+)(.*) @@", header)
    before_number = skipped_before + int(numbers[1])
    after_number = skipped_after + int(numbers[3])
    return f"@@ -{before_number}{numbers[2]} +{after_number}{numbers[4]} @@"
