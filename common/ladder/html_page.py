"""Diffs of rungs side by side, as HTML that loads nothing."""

import html
from itertools import pairwise

from common.ladder.alignment import Piece, Row, marked, rows
from common.ladder.diffs import CONTEXT, Hunk, changed_lines, diff
from common.ladder.scripts import file_name

FOLD = 12  # so many equal lines and more are folded


def page(rungs: list[str]) -> str:
    """A page of its own with what `side_by_side` gives."""
    title = " → ".join(rungs)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style>'
        f"<body><main>{side_by_side(rungs)}</main></body></html>\n"
    )


def side_by_side(rungs: list[str]) -> str:
    """Each script beside the next one, as a fragment of HTML: equal lines level, changed words marked.

    It looks right with STYLE in the page. On a narrow screen the lines stand one under the other, equal ones once.
    """
    sections = [_section(before, after) for before, after in pairwise(rungs)]
    return "\n".join(sections)


def _section(before: str, after: str) -> str:
    changed = changed_lines(before, after)
    name = f"{before}-{after}".replace("/", "-")
    counts = f"{changed.added} lines added, {changed.removed} removed"
    body = "".join(_hunk(hunk) for hunk in diff(before, after, docstring=True))
    return (
        f'<section class="diff" id="{name}">'
        f"<h3>{before} <span>→</span> {after} <small>{counts}</small></h3>"
        f'<div class="files">'
        f'<div class="row head"><code>{file_name(before)}</code><code>{file_name(after)}</code></div>'
        f"{body}</div></section>"
    )


def _hunk(hunk: Hunk) -> str:
    before_number = hunk.before_number
    after_number = hunk.after_number
    shown = []
    for row in rows(hunk):
        shown.append(_row(row, before_number, after_number))
        before_number += row.before is not None
        after_number += row.after is not None
    if hunk.kind == "equal" and len(shown) >= FOLD:
        return _folded(shown)
    return "".join(shown)


def _folded(shown: list[str]) -> str:
    head = "".join(shown[:CONTEXT])
    hidden = shown[CONTEXT:-CONTEXT]
    tail = "".join(shown[-CONTEXT:])
    summary = f"<summary>{len(hidden)} equal lines</summary>"
    return f"{head}<details>{summary}{''.join(hidden)}</details>{tail}"


def _row(row: Row, before_number: int, after_number: int) -> str:
    kind = "equal" if row.before == row.after else "changed"
    pieces = marked(row)
    left = '<div class="before none"></div>'
    if row.before is not None:
        left = _cell("before", "del", row.before, pieces.before, before_number)
    right = '<div class="after none"></div>'
    if row.after is not None:
        right = _cell("after", "ins", row.after, pieces.after, after_number)
    return f'<div class="row {kind}">{left}{right}</div>'


def _cell(side: str, tag: str, line: str, pieces: list[Piece], number: int) -> str:
    code = ""
    for piece in pieces:
        text = html.escape(piece.text)
        code += f"<{tag}>{text}</{tag}>" if piece.changed else text
    indent = len(line) - len(line.lstrip())
    return f'<div class="{side}"><i>{number}</i><code style="--in:{indent}ch">{code}</code></div>'


STYLE = """
:root { --ink: #1f2328; --soft: #59636e; --line: #d1d9e0; --paper: #fff; --shade: #f6f8fa;
  --gone: #fff1e5; --gone-word: #ffc680; --come: #e6f2ff; --come-word: #a8d1ff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9198a1; --line: #3d444d; --paper: #0d1117;
  --shade: #151b23; --gone: #2f1f0d; --gone-word: #7a4506; --come: #0d2238; --come-word: #134a85; } }
* { box-sizing: border-box; }
body { margin: 0; color: var(--ink); background: var(--paper); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 16px; }
.diff h3 small { color: var(--soft); font-weight: normal; margin-left: .5em; }
.diff h3 span { color: var(--soft); }
.files { border: 1px solid var(--line); border-radius: 6px; overflow: hidden; font-size: 12px; line-height: 1.45; }
.files code { font-family: ui-monospace, "DejaVu Sans Mono", Consolas, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; }
.row { display: grid; grid-template-columns: 1fr 1fr; }
.row.head { background: var(--shade); border-bottom: 1px solid var(--line); font-weight: 600; }
.row.head code { padding: 6px 12px; }
.row > div { display: flex; min-width: 0; padding-right: 8px; }
.row > .after { border-left: 1px solid var(--line); }
.row i { flex: 0 0 3em; padding-right: 8px; text-align: right; color: var(--soft); font-style: normal;
  user-select: none; }
.row div > code { flex: 1; min-width: 0; --hang: calc(var(--in) + 4ch + 1.2em); padding-left: var(--hang);
  text-indent: calc(-1 * var(--hang)); }
.row div > code::before { content: ""; display: inline-block; width: 1.2em; text-indent: 0; color: var(--soft); }
.changed .before:not(.none) { background: var(--gone); }
.changed .after:not(.none) { background: var(--come); }
.changed .before code::before { content: "−"; }
.changed .after code::before { content: "+"; }
.changed .none { background: var(--shade); }
.files del { background: var(--gone-word); text-decoration: none; border-radius: 2px; }
.files ins { background: var(--come-word); text-decoration: none; border-radius: 2px; }
.files summary { padding: 3px 12px; background: var(--shade); color: var(--soft); cursor: pointer; }
@media (max-width: 760px) {
  .row, .row.head { grid-template-columns: minmax(0, 1fr); }
  .row > .after { border-left: 0; }
  .row .none, .row.equal .before { display: none; }
  .files { font-size: 11px; }
}
"""
