"""How the change from one level to the next is shown: in a terminal, and side by side in a page."""

import difflib
import html
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise

from common import ladder

WIDTH = 80
ALIKE = 0.6  # from this similarity on, two lines stand side by side
FOLD = 12  # so many equal lines and more are folded in a page
RED, GREEN, DIM, STRONG, END = "\x1b[31m", "\x1b[32m", "\x1b[2m", "\x1b[1;7m", "\x1b[0m"


@dataclass(frozen=True)
class Row:
    """A line of one file beside the line of the other that takes its place; None where nothing does."""

    before: str | None
    after: str | None


def rows(hunk: ladder.Hunk) -> list[Row]:
    """The lines of a hunk side by side, so that what stands together is as similar as the order of lines allows."""
    old, new = hunk.before, hunk.after
    if hunk.kind == "equal":
        return [Row(line, line) for line in old]
    # best[i][j]: the highest sum of similarities that pairs of old[i:] and new[j:] can have.
    best = [[0.0] * (len(new) + 1) for _ in range(len(old) + 1)]
    alike = [[_similarity(line, other) for other in new] for line in old]
    for i in reversed(range(len(old))):
        for j in reversed(range(len(new))):
            best[i][j] = max(best[i + 1][j], best[i][j + 1], best[i + 1][j + 1] + alike[i][j])
    result, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        if i < len(old) and j < len(new) and alike[i][j] and best[i][j] == best[i + 1][j + 1] + alike[i][j]:
            result.append(Row(old[i], new[j]))
            i, j = i + 1, j + 1
        elif i < len(old) and (j == len(new) or best[i][j] == best[i + 1][j]):
            result.append(Row(old[i], None))
            i += 1
        else:
            result.append(Row(None, new[j]))
            j += 1
    return result


def _similarity(line: str, other: str) -> float:
    ratio = difflib.SequenceMatcher(None, line.strip(), other.strip(), autojunk=False).ratio()
    return ratio if ratio >= ALIKE else 0.0


def words(row: Row) -> tuple[list[tuple[str, bool]], list[tuple[str, bool]]]:
    """Both lines of a row cut into pieces, each with whether it changed; a line that stands alone is one piece."""
    if row.before is None or row.after is None:
        return [(row.before or "", False)], [(row.after or "", False)]
    ours, theirs = (re.findall(r"\w+|\s+|.", line) for line in (row.before, row.after))
    opcodes = difflib.SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes()
    left = [("".join(ours[i1:i2]), kind != "equal") for kind, i1, i2, _, _ in opcodes if i2 > i1]
    right = [("".join(theirs[j1:j2]), kind != "equal") for kind, _, _, j1, j2 in opcodes if j2 > j1]
    return left, right


def wants_colour(stream) -> bool:
    """Whether `stream` is a terminal and the user has not set NO_COLOR (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


def terminal(before: str, after: str, colour: bool) -> str:
    """The diff in 80 columns: what goes, what comes, and the lines around it; changed words stand out in colour."""
    added, removed = ladder.changed_lines(before, after)
    title = f"{before} → {after}: {added} lines added, {removed} removed"
    out = [title, "without blank lines and the text on top of each file", ""]
    hunks = ladder.diff(before, after)
    for i, hunk in enumerate(hunks):
        if hunk.kind != "equal":
            shown = rows(hunk)
            out += [line for row in shown if row.before is not None for line in _lines("-", words(row)[0], colour)]
            out += [line for row in shown if row.after is not None for line in _lines("+", words(row)[1], colour)]
            continue
        lines, context = hunk.after, ladder.CONTEXT
        head = lines[: context if i else 0] if len(lines) > 2 * context + 1 else lines
        tail = lines[max(len(lines) - context, len(head)) :] if i + 1 < len(hunks) else ()
        out += [line for text in head for line in _lines(" ", [(text, False)], colour)]
        if hidden := len(lines) - len(head) - len(tail):
            mark = f"  ⋮ {hidden} equal line{'s' if hidden > 1 else ''}"
            out.append(f"{DIM}{mark}{END}" if colour else mark)
        out += [line for text in tail for line in _lines(" ", [(text, False)], colour)]
    return "\n".join(out) + "\n"


def _lines(sign: str, pieces: list[tuple[str, bool]], colour: bool) -> Iterator[str]:
    """One line of a file, wrapped to the width between words; what does not fit stands four columns deeper."""
    text = "".join(piece for piece, _ in pieces)
    changed = [flag for piece, flag in pieces for _ in piece]
    margin = len(text) - len(text.lstrip())
    start, indent = 0, ""
    while True:
        end, room = len(text), WIDTH - 2 - len(indent)
        if end - start > room:
            end = text.rfind(" ", start + (0 if indent else margin) + 1, start + room + 1)
            end = end if end > 0 else start + room
        yield _painted(f"{sign} {indent}", text[start:end], changed[start:end], colour).rstrip()
        start = end + (text[end : end + 1] == " ")
        if start >= len(text):
            return
        indent = " " * (margin + 4)


def _painted(prefix: str, text: str, changed: list[bool], colour: bool) -> str:
    if not colour:
        return prefix + text
    base = {"-": RED, "+": GREEN, " ": ""}[prefix[0]]
    painted = base + prefix
    for flag, run in groupby(zip(changed, text, strict=True), key=lambda pair: pair[0]):
        piece = "".join(letter for _, letter in run)
        painted += f"{STRONG}{piece}{END}{base}" if flag else piece
    return painted + END * bool(base)


def side_by_side_html(levels: list[str]) -> str:
    """Each level's train.py beside the next one's, as a fragment of HTML: equal lines level, changed words marked.

    It looks right with STYLE in the page. On a narrow screen the lines stand one under the other, equal ones once.
    """
    return "\n".join(_pair(before, after) for before, after in pairwise(levels))


def _pair(before: str, after: str) -> str:
    added, removed = ladder.changed_lines(before, after)
    body = "".join(_hunk(hunk) for hunk in ladder.diff(before, after, docstring=True))
    return (
        f'<section class="diff" id="{before}-{after}">'
        f"<h3>{before} <span>→</span> {after} <small>{added} lines added, {removed} removed</small></h3>"
        f'<div class="files"><div class="row head"><code>{before}/train.py</code><code>{after}/train.py</code></div>'
        f"{body}</div></section>"
    )


def _hunk(hunk: ladder.Hunk) -> str:
    numbers = [hunk.before_number, hunk.after_number]
    out = []
    for row in rows(hunk):
        kind = "equal" if row.before == row.after else "changed"
        cells = ""
        for side, (name, text, pieces) in enumerate(
            zip(("before", "after"), (row.before, row.after), words(row), strict=True)
        ):
            if text is None:
                cells += f'<div class="{name} none"></div>'
                continue
            tag = ("del", "ins")[side]
            code = "".join(f"<{tag}>{html.escape(p)}</{tag}>" if flag else html.escape(p) for p, flag in pieces)
            indent = len(text) - len(text.lstrip())
            cells += f'<div class="{name}"><i>{numbers[side]}</i><code style="--in:{indent}ch">{code}</code></div>'
            numbers[side] += 1
        out.append(f'<div class="row {kind}">{cells}</div>')
    if hunk.kind == "equal" and len(out) >= FOLD:
        keep = ladder.CONTEXT
        folded = "".join(out[keep:-keep])
        summary = f"<summary>{len(out) - 2 * keep} equal lines</summary>"
        return "".join(out[:keep]) + f"<details>{summary}{folded}</details>" + "".join(out[-keep:])
    return "".join(out)


def page(levels: list[str]) -> str:
    """A page of its own with what `side_by_side_html` gives; it loads nothing."""
    title = " → ".join(levels)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style>'
        f"<body><main>{side_by_side_html(levels)}</main></body></html>\n"
    )


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
