"""Differences between two scripts of the ladder."""

import difflib
from typing import NamedTuple

from common.ladder import ROOT, lines_below_docstring, script

CONTEXT = 3  # equal lines shown around a change


class Hunk(NamedTuple):
    """Consecutive lines that two files share ("equal"), or that differ ("replace", "delete", "insert")."""

    kind: str
    before: tuple[str, ...]
    after: tuple[str, ...]


def diff(before: str, after: str) -> list[Hunk]:
    """The changes from one script to another, in order, with all lines of both but the module docstrings."""
    ours = lines_below_docstring(before)
    theirs = lines_below_docstring(after)
    # Blank lines are equal everywhere, so they must not align two files.
    matcher = difflib.SequenceMatcher(lambda line: not line.strip(), ours, theirs, autojunk=False)
    hunks = []
    for kind, start, end, other_start, other_end in matcher.get_opcodes():
        hunks.append(Hunk(kind, tuple(ours[start:end]), tuple(theirs[other_start:other_end])))
    return hunks


def unified(before: str, after: str) -> str:
    """The diff of two scripts as text, in the form of `diff -u`, without the module docstrings and line numbers."""
    ours = lines_below_docstring(before)
    theirs = lines_below_docstring(after)
    old_path = script(before).relative_to(ROOT).as_posix()
    new_path = script(after).relative_to(ROOT).as_posix()
    text = ""
    for line in difflib.unified_diff(ours, theirs, old_path, new_path, n=CONTEXT, lineterm=""):
        # Line numbers would be wrong, because the docstrings were cut off.
        text += "@@\n" if line.startswith("@@ ") else f"{line}\n"
    return text
