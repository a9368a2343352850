"""Checks of single calls: collectives are made by all ranks, and files are written by one."""

from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from common.doctor.answers import Answer, Finding, Healthy, Unseen
from common.doctor.record import Record


class Difference(NamedTuple):
    """A collective that not all ranks call, in words.

    Attributes:
        pitfall: the page of the lab, where it is rank 0 that calls it and no other rank does.
    """

    text: str
    pitfall: str | None


def collectives(records: list[Record]) -> Answer:
    topic = "collectives"
    number = max(len(record.collectives) for record in records)
    if not number:
        return Unseen(topic, "the script itself calls none")
    different = different_collective(records)
    if different:
        return Finding(topic, different.text, different.pitfall, "let all ranks call it, and rank 0 print")
    if not all(record.ended == "whole" for record in records) and different_collective(records, lines=True):
        return Unseen(topic, f"the run broke off with the ranks at different ones of {number}")
    return Healthy(topic, f"{number}, the same on all ranks")


def different_collective(records: list[Record], lines: bool = False) -> Difference | None:
    """The first collective in which the ranks differ: in its kind, or where `lines`, in the line that calls it.

    A rank that was stopped may be about to make the next one.
    """
    ended = all(record.ended == "whole" for record in records)
    for number, calls in enumerate(zip_longest(*(record.collectives for record in records)), 1):
        if None in calls and not (ended or lines):
            return None
        kinds = {call and (call if lines else call[0]) for call in calls}
        if len(kinds) > 1:
            ranks = [f"rank {rank} {_described(call)}" for rank, call in enumerate(calls)]
            on_rank_0 = calls[0] is not None and calls[0] not in calls[1:]
            pitfall = "collective_on_rank_0" if on_rank_0 else None
            return Difference(f"collective {number} of the script: {', '.join(ranks)}", pitfall)
    return None


def _described(call: tuple[str, str] | None) -> str:
    return f"{call[0]} in {call[1]}" if call else "none"


def saves(records: list[Record]) -> Answer:
    topic = "files"
    paths = sorted({save.path for record in records for save in record.saves} - {"/dev/null"})
    if not paths:
        return Unseen(topic, "no rank called torch.save with a path")
    for path in paths:
        times = [sum(save.path == path for save in record.saves) for record in records]
        writers = [record.rank for record, count in zip(records, times, strict=True) if count]
        if len(writers) > 1:
            return Finding(
                topic,
                f"{Path(path).name} is written {sum(times)} times, by ranks {' and '.join(map(str, writers))}",
                "every_rank_saves",
                "let rank 0 write, to another name until the file is complete, and the others wait",
            )
    return Healthy(topic, f"{len(paths)}, each written by one rank")


def keys(records: list[Record]) -> Answer:
    topic = "saved keys"
    saved = [save for record in records for save in record.saves if save.keys]
    if not saved:
        return Unseen(topic, "no state dict went to torch.save")
    own = any(model.has_module for record in records for model in record.models)
    for save in saved:
        if save.prefixed and not own:
            return Finding(
                topic,
                f"{save.prefixed} of {save.keys} in {Path(save.path).name} begin with `module.`",
                "prefixed_keys",
                "save `model.module.state_dict()`",
            )
    return Healthy(topic, f"{saved[0].keys}, as the network has them")
