"""Random scripts on the original and on ours: drawn from a seed, run on both, compared bit for bit.

A kind of script (`random_orders`, `random_trainings`, `random_trainers`) says how a script is drawn, what it comes to
on one rank of either library, and where the two may differ. What a script comes to is a nest of dicts and lists;
the place of a number in it is written as in "epochs.0.loss.3". The deliberate differences are excused place by place:
a row of the table names, for a script that it concerns, the places at which it may show. Whatever differs elsewhere,
in the same script too, ends the comparison with an error that shows the script.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch

from common.processes import ranks

CHUNK = 20  # scripts that are given to the ranks at once
PATIENCE = 600  # seconds for a chunk
ABSENT = "ABSENT"  # in place of what one of the two does not have

# The places at which a row may show in a script, as a regular expression; None where the row does not concern it.
MayDiffer = Callable[[Any, Any, Any], str | None]


@dataclass(frozen=True)
class Kind:
    """A kind of script.

    Attributes:
        libraries: the packages of ours and of the original.
        draw: the script of a seed and a number of processes.
        run: what each of some scripts comes to on this rank, called with the library, the scripts and a folder.
        rows: for each row of the table of differences, `may_differ(script, ours, theirs)`.
        hangs: of a script and what it came to on ours, the reason for which it would not end on the original, if any.
    """

    libraries: tuple[str, str]
    draw: Callable[[int, int], Any]
    run: Callable[[str, list, str], list]
    rows: dict[str, MayDiffer]
    hangs: Callable[[Any, Any, int], str | None] = field(default=lambda script, ours, processes: None)


def differences(ours: Any, theirs: Any, place: str = "") -> Iterator[str]:
    """The places at which two outcomes differ in a bit."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in ours | theirs:
            yield from differences(ours.get(key, ABSENT), theirs.get(key, ABSENT), f"{place}.{key}".lstrip("."))
    elif isinstance(ours, (list, tuple)) and type(ours) is type(theirs):
        for index, (one, other) in enumerate(zip_longest(ours, theirs, fillvalue=ABSENT)):
            yield from differences(one, other, f"{place}.{index}".lstrip("."))
    elif not _same_bits(ours, theirs):
        yield place


def _same_bits(ours: Any, theirs: Any) -> bool:
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, torch.Tensor):
        alike = ours.dtype == theirs.dtype and ours.shape == theirs.shape
        return alike and torch.allclose(ours, theirs, rtol=0, atol=0, equal_nan=True)
    both_nan = ours != ours and theirs != theirs
    return both_nan or ours == theirs


def value_at(outcome: Any, place: str) -> Any:
    """What stands at a place of an outcome."""
    for key in place.split("."):
        if isinstance(outcome, (list, tuple)):
            outcome = outcome[int(key)] if int(key) < len(outcome) else ABSENT
        else:
            outcome = next((value for name, value in outcome.items() if str(name) == key), ABSENT)
    return outcome


def rows_of(kind: Kind, script: Any, ours: Any, theirs: Any) -> set[str]:
    """The rows that excuse what differs on one rank.

    Raises:
        AssertionError: if something differs that no row excuses.
    """
    left = list(differences(ours, theirs))
    rows = set()
    for row, may_differ in kind.rows.items():
        places = may_differ(script, ours, theirs) if left else None
        if places is None:
            continue
        unexcused = [place for place in left if not re.fullmatch(places, place)]
        if len(unexcused) < len(left):
            rows.add(row)
            left = unexcused
    shown = [f"{place}: {value_at(ours, place)} / {value_at(theirs, place)}" for place in left[:10]]
    assert not left, "\n  ".join([f"{script}: {len(left)} places differ, ours / theirs", *shown])
    return rows


def compare(kind: Kind, seeds: Sequence[int], processes: int, folder: str = "") -> Counter:
    """Run the scripts of `seeds` on both libraries; how many are equal (`None`), and how many each row excuses."""
    counts: Counter = Counter()
    for start in range(0, len(seeds), CHUNK):
        chunk = seeds[start : start + CHUNK]
        scripts = [kind.draw(seed, processes) for seed in chunk]
        ours = run_on(kind, 0, scripts, processes, f"{folder}/ours-{start}")
        hangs = [kind.hangs(script, one[0], processes) for script, one in zip(scripts, ours, strict=True)]
        counts.update(reason for reason in hangs if reason)
        ending = [script for script, reason in zip(scripts, hangs, strict=True) if not reason]
        theirs = iter(run_on(kind, 1, ending, processes, f"{folder}/theirs-{start}"))
        for seed, script, of_ranks, reason in zip(chunk, scripts, ours, hangs, strict=True):
            if reason:
                continue
            rows = set()
            for rank, (one, other) in enumerate(zip(of_ranks, next(theirs), strict=True)):
                try:
                    rows |= rows_of(kind, script, one, other)
                except AssertionError as error:
                    raise AssertionError(f"script {seed}, rank {rank} of {processes}: {error}") from None
            counts.update(rows or [None])
    return counts


def run_on(kind: Kind, which: int, scripts: list, processes: int, folder: str) -> list[tuple]:
    """What each script comes to on the ranks, in their order, with ours (0) or the original (1)."""
    library = kind.libraries[which]
    if processes == 1:
        return [(outcome,) for outcome in kind.run(library, scripts, folder)]
    by_rank = ranks(processes).run(kind.run, library, scripts, folder, timeout=PATIENCE)
    return list(zip(*by_rank, strict=True))
