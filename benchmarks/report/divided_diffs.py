"""The diff of two scripts, divided among the parts of a README that explain it.

Each part begins with the change that contains its anchor, and goes on to where the next one begins. So every sentence
beside a part stays with the lines that it is about, and no change can be forgotten: what a page does not show, such as
imports, belongs to a part that says so.
"""

import re
from collections.abc import Callable, Iterable

from common import ladder

CONTEXT = 1  # equal lines shown before and after a change


class Drift(ValueError):
    """A README asks for something that the levels do not have."""


def divided(before: str, after: str, anchors: dict[str, str]) -> dict[str, str]:
    """The whole diff of two scripts in as many blocks as there are anchors, by anchor.

    Args:
        anchors: the kind of each part, one of KINDS, by its anchor. An anchor is part of a line that changes, and of
            one change only; the first belongs to the first change.

    Raises:
        Drift: if the anchors do not divide the diff so.
    """
    hunks = ladder.diff(before, after)
    changes = [position for position, hunk in enumerate(hunks) if hunk.kind != "equal"]
    starts = []
    for anchor in anchors:
        found = [position for position in changes if _contains(hunks[position], anchor)]
        if len(found) != 1:
            raise Drift(f"{len(found)} changes from {before} to {after} contain {anchor!r}; an anchor must be in one")
        starts.append(found[0])
    in_order = sorted(set(starts))
    if starts != in_order or starts[0] != changes[0]:
        raise Drift(f"the parts of the diff from {before} to {after} must begin with its first change and be in order")
    ends = [*starts[1:], len(hunks)]
    blocks = {}
    for (anchor, kind), start, end in zip(anchors.items(), starts, ends, strict=True):
        last_change = max(position for position in changes if position < end)
        blocks[anchor] = _block(hunks, start, last_change + 1, kind)
        if kind != "unshown" and not re.search(r"^[-+]", blocks[anchor], re.MULTILINE):
            raise Drift(f"the part at {anchor!r} shows no change from {before} to {after}")
    return blocks


def signed(hunk: ladder.Hunk) -> list[str]:
    """The lines of a change, those that go after a "-" and those that come after a "+", without blank ones."""
    gone = [f"- {line}" for line in _without_blank(hunk.before)]
    return gone + added(hunk)


def added(hunk: ladder.Hunk) -> list[str]:
    """The lines of a change that come, after a "+", without blank ones."""
    return [f"+ {line}" for line in _without_blank(hunk.after)]


def unshown(hunk: ladder.Hunk) -> list[str]:
    """No line: a page explains the change in no sentence, or not at all, and says where the whole diff is."""
    return []


# What a part of each kind shows of a change.
KINDS: dict[str, Callable[[ladder.Hunk], list[str]]] = {"diff": signed, "added": added, "unshown": unshown}


def _contains(hunk: ladder.Hunk, anchor: str) -> bool:
    return any(anchor in line for line in hunk.before + hunk.after)


def _block(hunks: list[ladder.Hunk], start: int, end: int, kind: str) -> str:
    """The hunks from `start` to before `end`, with a line of what stands around them; nothing where none is shown."""
    if kind == "unshown":
        return ""
    shown = KINDS[kind]
    lines = ["```diff"]
    if start > 0:
        above = _shared(hunks[start - 1])
        lines += above[-CONTEXT:]
    for hunk in hunks[start:end]:
        lines += _folded(hunk) if hunk.kind == "equal" else shown(hunk)
    if end < len(hunks):
        below = _shared(hunks[end])
        lines += below[:CONTEXT]
    return "\n".join([*lines, "```"])


def _folded(hunk: ladder.Hunk) -> list[str]:
    shared = _shared(hunk)
    if len(shared) <= 2 * CONTEXT + 1:
        return shared
    return [*shared[:CONTEXT], "  …", *shared[-CONTEXT:]]


def _shared(hunk: ladder.Hunk) -> list[str]:
    return [f"  {line}" for line in _without_blank(hunk.after)]


def _without_blank(lines: Iterable[str]) -> list[str]:
    return [line for line in lines if line.strip()]
