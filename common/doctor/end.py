"""The script's end: a rank has crashed, or ranks wait for each other, mostly in different collectives.

A rank that crashes takes others with it: their connections are lost. The first other error is taken for the cause.
"""

import inspect
import sys
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch.distributed as dist

from common.doctor.answers import Answer, Finding, NotExamined, Right
from common.doctor.data import training_epochs
from common.doctor.heartbeat import script_line
from common.doctor.record import Call, Record, across_ranks
from common.doctor.recorder import Recorder
from common.process_group import COLLECTIVES

ON_ALL_RANKS = (*COLLECTIVES, "barrier", "monitored_barrier")

MAX_ERROR = 300  # characters of an error's text that are shown
UNFINISHED = "finished reduction in the prior iteration"  # DDP, where a gradient has not come


def watch(recorder: Recorder, script: Path) -> None:
    for name in ON_ALL_RANKS:
        _watch_collective(recorder, name, script)


def _watch_collective(recorder: Recorder, name: str, script: Path) -> None:
    parameters = inspect.signature(getattr(dist, name))

    def note_collective(*args: Any, **kwargs: Any) -> None:
        group = parameters.bind(*args, **kwargs).arguments.get("group")
        if dist.is_initialized() and group in (None, dist.group.WORLD):
            place = script_line(sys._getframe(), script)
            recorder.record.collectives.append(Call(name, place.line if place else "?"))
            recorder.keep()

    recorder.watch(dist, name, before=note_collective)


def check_end(records: list[Record], patience: float) -> Answer:
    """The answer about the end, where ranks that made no progress for `patience` seconds were stopped."""
    crashed = [record for record in records if record.crash]
    for record in crashed:
        if not is_lost_connection(record.crash):
            return _crashed(record)
    if crashed or any(record.ended == "stopped" for record in records):
        return _waiting(records, patience)
    if any(record.ended == "steps" for record in records):
        return NotExamined(f"ended after {records[0].steps} steps, as --steps asked")
    return Right()


def is_lost_connection(error: str) -> bool:
    """True for the error of a rank whose partner has ended, or has called another collective.

    torch raises a plain RuntimeError for it, so only the text can tell. An error of the script's own with one of these
    words is taken for one too. So the report shows the text of each.
    """
    signs = ("Timed out", "timeout", "Connection closed by peer", "Connection reset by peer", "gloo", "NCCL")
    return any(sign in error for sign in signs)


def _crashed(record: Record) -> Finding:
    crashed = f"rank {record.rank} crashed after {record.steps} optimizer steps"
    if UNFINISHED not in record.crash:
        return Finding(f"{crashed}: {record.crash[:MAX_ERROR]}", "mend the error, and call the doctor again")
    text = f"{crashed}: DistributedDataParallel waits for the gradients of parameters that the forward does not use"
    unused = []  # their names, as far as known: an optimizer step notes them
    for network in record.networks:
        if network.forwards:
            unused += network.without_gradient
    if unused:
        text += f"; {len(unused)} have none ({', '.join(unused[:3])})"
    return Finding(
        text,
        "freeze or remove them before wrapping, or let DDP look for them with find_unused_parameters=True",
        pitfall="unused_parameter",
    )


def _waiting(records: list[Record], patience: float) -> Finding:
    text = ", ".join(map(_where, records))
    if not any(record.crash for record in records):
        text = f"no rank made progress for {patience:g} s: {text}"
    # Uneven epochs come first: they also make the collectives differ, and explain it.
    uneven = _uneven_epoch(records)
    if uneven:
        return Finding(f"{text}; {uneven}", "give all ranks equally many batches, or use Join", pitfall="uneven_inputs")
    calls = _first_different_calls(records)
    if calls:
        by_rank = []
        for rank, call in enumerate(calls):
            by_rank.append(f"rank {rank} {call.name} in {call.line}" if call else f"rank {rank} none")
        text = f"{text}; the first collective that is not the same: {', '.join(by_rank)}"
        if calls[0] is not None and calls[0] not in calls[1:]:
            return Finding(text, "let all ranks call it, and rank 0 print", pitfall="collective_on_rank_0")
    return Finding(text, "see what each of these lines waits for: all ranks must leave a loop at one step")


def _where(record: Record) -> str:
    if record.crash:
        return f"rank {record.rank} was left alone ({record.crash[:MAX_ERROR]})"
    if record.line:
        return f"rank {record.rank} is in {record.line} ({record.called})"
    return f"rank {record.rank} has ended"


def _uneven_epoch(records: list[Record]) -> str | None:
    """The numbers of batches of the first epoch that has ended on one rank and goes on on another one."""
    for number, by_rank in enumerate(across_ranks(map(training_epochs, records))):
        shortest = min(by_rank, key=lambda epoch: epoch.batches)
        if shortest.complete and any(epoch.batches > shortest.batches for epoch in by_rank):
            batches = [f"rank {rank} has {epoch.batches}" for rank, epoch in enumerate(by_rank)]
            return f"of the batches of epoch {number} {', '.join(batches)}"
    return None


def _first_different_calls(records: list[Record]) -> tuple[Call | None, ...]:
    """The first collective that is not the same on all ranks; None for a rank that has called no more."""
    for calls in zip_longest(*[record.collectives for record in records]):
        if len(set(calls)) > 1:
            return calls
    return ()
