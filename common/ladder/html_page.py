"""Diffs of rungs side by side, as HTML that loads nothing."""

import difflib
from itertools import pairwise

from common.ladder.diffs import CONTEXT, changed_lines
from common.ladder.scripts import file_name, source


def page(rungs: list[str]) -> str:
    """A page of its own with what `side_by_side` gives."""
    title = " → ".join(rungs)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style>'
        f"<body><main>{side_by_side(rungs)}</main></body></html>\n"
    )


def side_by_side(rungs: list[str]) -> str:
    """Each script's changes beside the next one's, as a fragment of HTML. It looks right with STYLE in the page."""
    sections = [_section(before, after) for before, after in pairwise(rungs)]
    return "\n".join(sections)


def _section(before: str, after: str) -> str:
    changed = changed_lines(before, after)
    table = difflib.HtmlDiff().make_table(
        source(before),
        source(after),
        file_name(before),
        file_name(after),
        context=True,
        numlines=CONTEXT,
    )
    # Spaces that may break let long lines wrap.
    table = table.replace("&nbsp;", " ").replace(' nowrap="nowrap"', "")
    return (
        f'<section class="changes"><h3>{before} → {after} '
        f"<small>{changed.added} lines added, {changed.removed} removed</small></h3>{table}</section>"
    )


STYLE = """
:root { --ink: #1f2328; --soft: #59636e; --line: #d1d9e0; --paper: #fff; --shade: #f6f8fa;
  --gone: #fff1e5; --gone-word: #ffc680; --come: #e6f2ff; --come-word: #a8d1ff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9198a1; --line: #3d444d; --paper: #0d1117;
  --shade: #151b23; --gone: #2f1f0d; --gone-word: #7a4506; --come: #0d2238; --come-word: #134a85; } }
* { box-sizing: border-box; }
body { margin: 0; color: var(--ink); background: var(--paper); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 16px; }
.changes { overflow-x: auto; }
.changes h3 small { color: var(--soft); font-weight: normal; margin-left: .5em; }
table.diff { border: 1px solid var(--line); border-collapse: collapse; width: 100%; min-width: 640px;
  font: 12px/1.45 ui-monospace, "DejaVu Sans Mono", Consolas, monospace; }
table.diff td { white-space: pre-wrap; overflow-wrap: anywhere; vertical-align: top; padding: 0 6px; width: 50%; }
table.diff td.diff_header, table.diff th { width: 3em; background: var(--shade); color: var(--soft); text-align: left; }
table.diff .diff_next, table.diff colgroup { display: none; }
table.diff .diff_add { background: var(--come-word); }
table.diff .diff_sub { background: var(--gone-word); }
table.diff .diff_chg { background: var(--shade); font-weight: 600; }
"""
