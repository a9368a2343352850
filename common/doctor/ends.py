"""Checks of the end: a rank that crashed, or ranks that wait for each other."""

import re
import textwrap

from common.doctor.answers import Answer, Finding, Healthy, Unseen
from common.doctor.compare_calls import different_collective
from common.doctor.compare_data import together, training_passes
from common.doctor.launch import Rank
from common.doctor.record import Record

# What a rank says whose partner has gone, or does something else.
LEFT_ALONE = ("Timed out", "timeout", "Connection closed by peer", "Connection reset by peer", "gloo", "NCCL")
EXIT = "exit code"
MESSAGE = 120  # characters
NEEDED = "The ranks need each other: one that stands still stops all."
SOURCE = re.compile(r"\[/[^\]]*\] ?")  # the line of a library in front of its message
UNFINISHED = "finished reduction in the prior iteration"


def end(ranks: list[Rank], patience: float) -> Answer:
    topic = "end of the script"
    crashes = {}
    own = {}  # those that no other rank has caused
    for rank in ranks:
        message = _crash(rank)
        if message is None:
            continue
        crashes[rank.record.rank] = message
        if not any(sign in message for sign in LEFT_ALONE):
            own[rank.record.rank] = message
    if own:
        first, message = min(own.items())
        return _crashed(first, message, ranks[first].record)
    if crashes or any(rank.hung for rank in ranks):
        return _waiting(ranks, crashes, patience)
    ends = {rank.record.ended for rank in ranks}
    if "stopped" in ends:
        return Unseen(topic, "it was interrupted")
    if "steps" in ends:
        return Unseen(topic, f"it was ended after {ranks[0].record.steps} optimizer steps")
    return Healthy(topic, f"reached by {len(ranks)} ranks")


def refusal(ranks: list[Rank]) -> str | None:
    """What a script printed that left before it made a process group, as one for a single process may do."""
    if any(rank.record.backend is not None or rank.record.steps for rank in ranks):
        return None
    left = [rank for rank in ranks if (rank.record.crash or "").startswith(EXIT)]
    return left[0].last_line if left else None


def _crash(rank: Rank) -> str | None:
    code = rank.record.crash
    if code and not code.startswith(EXIT):
        return code
    if rank.record.ended is None and rank.code != 0:  # without a last word: a signal, or os._exit
        code = "killed" if rank.code is None else f"{EXIT} {rank.code}"
    if code:
        return f"{code}; last printed: {rank.last_line[:200]}" if rank.last_line else code
    return None


def _crashed(rank: int, message: str, record: Record) -> Finding:
    text = f"rank {rank} crashed after {record.steps} optimizer steps: {message[:300]}"
    if UNFINISHED not in message:
        return Finding("end of the script", text, None, "mend the error, and call the doctor again", NEEDED)
    unused = [name for model in record.models for name in model.without_gradient]
    parameters = sum(model.parameters for model in record.models if model.forwards)
    names = ", ".join(unused[:3])
    return Finding(
        "end of the script",
        f"rank {rank} crashed after {record.steps} optimizer steps: DDP waits for the gradients of {len(unused)} of "
        f"{parameters} parameters, which the forward does not use ({names})",
        "unused_parameter",
        "freeze or remove them before wrapping, or let DDP look for them with find_unused_parameters=True",
    )


def _waiting(ranks: list[Rank], crashes: dict[int, str], patience: float) -> Finding:
    records = [rank.record for rank in ranks]
    places = []
    for record in records:
        if record.rank in crashes:
            sentence, *_ = SOURCE.sub("", crashes[record.rank]).split(". ")
            message = textwrap.shorten(sentence, MESSAGE, placeholder=" …")
            places.append(f"rank {record.rank} was left alone ({message})")
        elif record.place:
            line, *called = record.place
            places.append(f"rank {record.rank} is in {line} ({called[0] if called else 'Python'})")
        else:
            places.append(f"rank {record.rank} has ended")
    text = f"no rank got on for {patience:g} s: {', '.join(places)}"
    if crashes:
        text = "; ".join(places)
    uneven = _uneven_passes(records)
    if uneven:
        advice = "give all ranks equally many batches, or use Join"
        return Finding("end of the script", f"{text}; {uneven}", "uneven_inputs", advice)
    left = _left_training(records)
    if left:
        advice = "let all ranks leave the loop at one step: reduce over the ranks what decides it"
        why = "A rank left the training earlier than another one, which waits for it."
        return Finding("end of the script", f"{text}; {left}", None, advice, why)
    different = different_collective(records, lines=True)
    if different:
        advice = "let all ranks call each collective, and rank 0 print"
        why = None if different.pitfall else NEEDED
        return Finding("end of the script", f"{text}; {different.text}", different.pitfall, advice, why)
    return Finding("end of the script", text, None, "see what each of these lines waits for", NEEDED)


def _left_training(records: list[Record]) -> str | None:
    """The forwards of a rank that has ended, or reads other data, where another one wanted to train on."""
    forwards = [sum(model.forwards for model in record.models) for record in records]
    left = [record.rank for record in records if record.ended == "whole" or _left_loop(record)]
    if not left:
        return None
    first = min(left, key=lambda rank: forwards[rank])
    longest = forwards.index(max(forwards))
    if forwards[first] == forwards[longest]:
        return None
    return (
        f"rank {first} left the training after {forwards[first]} forwards, "
        f"and rank {longest} had begun forward {forwards[longest]}"
    )


def _left_loop(record: Record) -> bool:
    """The rank has begun to read other data, with its newest pass in training not at the end."""
    passes = training_passes(record)
    return bool(passes) and not passes[-1].complete and record.passes[-1] is not passes[-1]


def _uneven_passes(records: list[Record]) -> str | None:
    for epoch, passes in enumerate(together([training_passes(record) for record in records])):
        shortest = min(passes, key=lambda one: one.batches)
        if shortest.complete and any(one.batches > shortest.batches for one in passes):
            batches = [f"rank {rank} has {one.batches}" for rank, one in enumerate(passes)]
            return f"of the batches of epoch {epoch} {', '.join(batches)}"
    return None
