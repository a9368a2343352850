"""The diff of two scripts of the ladder."""

import difflib

from common.ladder import ROOT, lines_below_docstring, script

CONTEXT = 3  # equal lines shown around a change


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
